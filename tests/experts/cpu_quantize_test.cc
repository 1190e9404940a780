// Vector row quantisers against the scalar rules, by bits, on every tier.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/tiers.h"
#include "experts/cpu/weight_format.h"
#include "experts/reference/operand.h"
#include "support/experts_run.h"
#include "support/random.h"

namespace moesaic {
namespace {

std::vector<const cpu::CpuKernels*> tier_kernels() {
  std::vector<const cpu::CpuKernels*> list;
  for (const cpu::TierInfo& t : cpu::cpu_tiers()) {
    if (t.available) list.push_back(t.kernels);
  }
  return list;
}

TEST(RowQuantisers, EqualTheScalarRules) {
  test::Rng rng(3);
  for (const cpu::CpuKernels* k : tier_kernels()) {
    for (const char* name : {"mxfp8", "mxfp4", "nvfp4", "fp8-channel", "fp8-static", "int8",
                             "fp8-block-1x48", "fp8-block-1x64"}) {
      const OperandQuant a = test::scheme_called(name).activation;
      for (int round = 0; round < 120; ++round) {
        const std::int64_t n = round % 2 == 0 ? 96 : 160;
        std::vector<float> x(static_cast<std::size_t>(n));
        const double sd = std::exp2(static_cast<double>(rng.integer(-30, 30)));
        for (float& v : x) v = static_cast<float>(sd * rng.normal());
        // Zeros, an outlier, ties, and magnitudes at which power-of-two scales change.
        if (round % 5 == 0) std::fill(x.begin(), x.begin() + 32, 0.0F);
        if (round % 5 == 1) x[40] *= 1000.0F;
        if (round % 5 == 2)
          for (float& v : x) v = std::nearbyint(v / static_cast<float>(sd) * 4) / 4;
        if (round % 5 == 3) x[33] = static_cast<float>(sd) * (round % 2 == 0 ? 1.75F : 7.0F);
        if (round == 4) std::fill(x.begin(), x.end(), 0.0F);
        const auto fixed = static_cast<float>(sd * 4 / 448);
        std::vector<float> want = x, got = x, want_scales(16, -1.0F), got_scales(16, -1.0F);
        std::vector<std::uint8_t> codes(x.size());
        experts::ref_quantize_row(a, fixed, want.data(), n, want_scales.data(), codes.data());
        k->quantize_row(experts::cpu_row_rule(a), a.block_k, fixed, got.data(), n,
                        got_scales.data());
        if (a.granularity == ScaleGranularity::kGroup) {  // multiplied in
          std::vector<float> scaled = x;
          k->quantize_row(experts::cpu_row_rule(a), a.block_k, fixed, scaled.data(), n, nullptr);
          for (std::int64_t i = 0; i < n; ++i) {
            const auto at = static_cast<std::size_t>(i);
            ASSERT_EQ(scaled[at], want[at] * want_scales[static_cast<std::size_t>(i / a.block_k)])
                << k->name << " " << name << " x " << x[at];
          }
        }
        if (a.granularity == ScaleGranularity::kTensor) want_scales[0] = -1.0F;  // not written
        ASSERT_EQ(got_scales, want_scales) << k->name << " " << name << " round " << round;
        for (std::size_t i = 0; i < x.size(); ++i)
          ASSERT_EQ(got[i], want[i]) << k->name << " " << name << " x " << x[i];
      }
    }
  }
}

TEST(RowQuantisers, NanAndInfinityReachTheScaleOfTheirGroup) {
  for (const cpu::CpuKernels* k : tier_kernels()) {
    for (const char* name : {"mxfp8", "mxfp4", "nvfp4", "fp8-channel", "int8"}) {
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        const OperandQuant a = test::scheme_called(name).activation;
        std::vector<float> x(64, 1.0F), scales(4, 0.0F);
        x[5] = bad;
        k->quantize_row(experts::cpu_row_rule(a), a.block_k, 0.01F, x.data(), 64, scales.data());
        EXPECT_FALSE(std::isfinite(scales[0])) << k->name << " " << name;
        if (a.block_k > 0) {
          EXPECT_TRUE(std::isfinite(scales[1])) << k->name << " " << name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
