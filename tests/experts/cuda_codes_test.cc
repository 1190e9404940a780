// How codes and scales become operands of the GPU's products: the functions that kernels and their
// loading share, over all codes. Needs neither CUDA nor a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cuda/group_values.h"
#include "experts/cuda_general/row_values.h"
#include "experts/reference/operand.h"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_int4_fp8.h"
#include "experts/sm90/codes_nvfp4.h"
#include "experts/sm90/shifted_exponents.h"
#include "numerics/codec.h"
#include "numerics/integer.h"
#include "quant/code_values.h"
#include "support/experts_run.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic::cuda {
namespace {

float bf16(std::uint32_t half) { return f32_from_bf16(static_cast<std::uint16_t>(half)); }
bool is_bf16(float v) { return f32_from_bf16(bf16_from_f32(v)) == v; }

// Every scale times every code, at both halves of a factor.
TEST(CudaCodes, Nvfp4ScalesBecomeBf16Factors) {
  for (std::uint32_t scale = 0; scale < 256; ++scale) {
    if ((scale & 0x7F) == 0x7F) continue;  // NaN
    const std::uint32_t strip = (scale & 0x7F) != 0 ? nvfp4_strip(scale & 0x7F) : 0;
    ASSERT_LT(strip, 256U);
    const std::uint32_t factor = nvfp4_factors(strip | strip << 16);
    ASSERT_EQ(factor & 0xFFFF, factor >> 16);
    for (std::uint32_t c = 0; c < 16; ++c) {
      const std::uint32_t code = nvfp4_code(c, scale);
      std::uint32_t a[4];
      e2m1_fragment(place_e2m1(code, 0, 0), a);
      const float got = bf16(a[0]) * bf16(factor);
      const float want = f32_from_e2m1(static_cast<std::uint8_t>(c)) *
                         f32_from_e4m3(static_cast<std::uint8_t>(scale));
      ASSERT_EQ(got * kNvfp4Unit, want) << scale << ' ' << c;
      ASSERT_TRUE(is_bf16(got));
    }
  }
}

// Every e4m3 code at every place of a word, times every factor.
TEST(CudaCodes, E4m3CodesBecomeBf16) {
  for (std::uint32_t c = 0; c < 256; ++c) {
    if ((c & 0x7F) == 0x7F) continue;
    for (int place = 0; place < 4; ++place) {
      std::uint32_t word = 0;
      for (int n = 0; n < 4; ++n) word |= place_e4m3(n == place ? c : 0x5A, n % 2, n / 2);
      std::uint32_t a[2];
      e4m3_pairs(word, a);
      const float value = bf16(a[place % 2] >> (16 * (place / 2)) & 0xFFFF);
      ASSERT_EQ(value * 0x1p120F, f32_from_e4m3(static_cast<std::uint8_t>(c)));
    }
    std::uint32_t a[2];
    e4m3_pairs(place_e4m3(c, 0, 0), a);
    for (int e = kLeastE4m3Scale; e <= kLargestE4m3Scale; ++e) {
      const float got = bf16(a[0]) * bf16(static_cast<std::uint32_t>(e4m3_factor(e)) << 7);
      ASSERT_EQ(got, std::ldexp(f32_from_e4m3(static_cast<std::uint8_t>(c)), e - 127));
      ASSERT_TRUE(is_bf16(got)) << c << ' ' << e;
    }
  }
}

// Every int4 code at every place of a word, under every scale that is not negative.
TEST(CudaCodes, Int4CodesBecomeRoundedProducts) {
  for (std::uint32_t scale = 0; scale < 0x7F; ++scale) {
    const float s = f32_from_e4m3(static_cast<std::uint8_t>(scale));
    ASSERT_EQ(e4m3_number(scale), s);
    const Int4Multiples multiples = int4_multiples(scale);
    for (std::uint32_t c = 0; c < 16; ++c) {
      for (int place = 0; place < 8; ++place) {
        const std::uint32_t other = 15 - c;
        const std::uint32_t word =
            ((other * 0x11111111U) & ~(15U << (4 * place))) | c << (4 * place);
        std::uint32_t a[2];
        int4_fp8_pair(int4_fp8_codes(word), multiples, a[0], a[1]);
        for (int i = 0; i < 8; ++i) {
          const auto code = static_cast<std::uint8_t>(a[i / 4] >> (8 * (i % 4)));
          const int value = i4_from_nibble(static_cast<std::uint8_t>(i == place ? c : other));
          ASSERT_EQ(f32_from_e4m3(code), quant::int4_fp8_value(value, s)) << scale << ' ' << c;
        }
      }
    }
  }
}

// Scales without a factor: rows are shifted, and the factor on their sums takes it back.
TEST(CudaCodes, ExponentsWithoutFactorsShiftTheirRow) {
  constexpr std::int64_t kGroups = 3;
  for (const DType dtype : {DType::kF4E2M1, DType::kF8E4M3}) {
    const FactorRange& range = dtype == DType::kF4E2M1 ? kE2m1Factors : kE4m3Factors;
    const std::vector<std::vector<std::uint8_t>> rows = {
        {100, 120, 128}, {129, 130, 12}, {254, 254, 250}, {150, 40, 151}, {0, 2, 1}, {200, 0, 90}};
    const auto count = static_cast<std::int64_t>(rows.size());
    Tensor weight = Tensor::zeros(dtype, {count, kGroups * 32}).value();
    Tensor scale = Tensor::zeros(DType::kF8E8M0, {count, kGroups}).value();
    for (std::int64_t i = 0; i < weight.bytes(); ++i) weight.as<std::uint8_t>()[i] = 0x11;
    const std::int64_t row_bytes = weight.bytes() / count;
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t g = 0; g < kGroups; ++g) {
        scale.as<std::uint8_t>()[n * kGroups + g] =
            rows[static_cast<std::size_t>(n)][static_cast<std::size_t>(g)];
      }
    }
    // The second group of the last row is zeros: any scale does. -0 is zero too.
    for (std::int64_t i = 0; i < row_bytes / kGroups; ++i) {
      weight.as<std::uint8_t>()[(count - 1) * row_bytes + row_bytes / kGroups + i] = 0x80;
    }
    const ShiftedExponents e =
        shift_exponents("w2_scale", range, weight.view(), scale.view()).value();
    const int base = range.base;
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t g = 0; g < kGroups; ++g) {
        if (n == count - 1 && g == 1) continue;
        const int field = e.fields[static_cast<std::size_t>(n * kGroups + g)];
        const int exponent = rows[static_cast<std::size_t>(n)][static_cast<std::size_t>(g)];
        const double means = std::ldexp(1.0, field - base - 127) *
                             static_cast<double>(e.factors[static_cast<std::size_t>(n)]);
        ASSERT_EQ(means, std::ldexp(1.0, exponent - 127)) << n << ' ' << g;
        ASSERT_GE(field - base, range.least);
        ASSERT_LE(field - base, range.largest);
      }
    }
    EXPECT_EQ(e.factors[0], 1.0F);
    // Further apart than bf16 reaches.
    scale.as<std::uint8_t>()[0] = 0;
    scale.as<std::uint8_t>()[1] = 254;
    test::expect_refusal(shift_exponents("w2_scale", range, weight.view(), scale.view()).status(),
                         StatusCode::kUnsupported,
                         {"w2_scale: got 2^-127 and 2^127 in row 0", "within a factor of 2^"});
  }
}

// The values of quantised groups are those of the reference, bit for bit.
TEST(CudaCodes, GroupValuesAreTheReferences) {
  struct Case {
    const char* quant;
    RowForm form;
  };
  test::Rng rng(7);
  for (const Case& c :
       {Case{"mxfp8", RowForm::kMx8Values}, Case{"mxfp4", RowForm::kMx4Values},
        Case{"nvfp4", RowForm::kNv4Values}, Case{"mxfp4-fp8", RowForm::kFp8Values}}) {
    const OperandQuant activation = test::scheme_called(c.quant).activation;
    const int n = row_group_columns(c.form);
    for (int round = 0; round < 20000; ++round) {
      std::vector<float> row(static_cast<std::size_t>(n));
      const double size = std::exp2(rng.integer(-110, 110));
      for (float& v : row) {
        // Ties and grid points, random numbers, zeros.
        const auto kind = rng.integer(0, 3);
        double x = kind == 0   ? static_cast<double>(rng.integer(-32, 32)) / 4
                   : kind == 1 ? rng.uniform() * 16 - 8
                   : kind == 2
                       ? 0.0
                       : std::ldexp(rng.uniform() - 0.5, static_cast<int>(rng.integer(-12, 4)));
        if (round % 7 == 0) x *= 64.0;
        const double scaled = round % 3 == 0 ? x : x * size;
        v = f32_from_bf16(bf16_from_f32(static_cast<float>(scaled)));
      }
      if (round == 0) row.assign(row.size(), 0.0F);
      if (round == 1) row.assign(row.size(), 1e-40F);
      // Infinite scales of groups of 128: fp8-block's.
      if (round == 2 && n < 128) row[3] = -std::numeric_limits<float>::infinity();
      // Its reciprocal stays finite.
      const float input_scale = static_cast<float>(
          std::max(std::exp2(rng.uniform() * 20 - 15) * (round % 2 == 0 ? 1.0 : size), 0x1p-100));
      float amax = 0;
      for (const float v : row) amax = std::max(amax, std::abs(v));
      const GroupScale scale = group_scale(c.form, amax, 1.0F / input_scale);
      std::vector<float> want = row, scales(2);
      std::vector<std::uint8_t> scratch(row.size());
      experts::ref_quantize_row(activation, input_scale, want.data(), n, scales.data(),
                                scratch.data());
      for (std::size_t i = 0; i < row.size(); ++i) {
        const float got = group_value(c.form, scale, row[i]);
        ASSERT_EQ(got, want[i] * scales[0]) << c.quant << ' ' << round << ' ' << i << ' ' << row[i];
      }
    }
    // Also where no other value gives the group a scale.
    for (const float amax : {1.0F, 0.0F}) {
      EXPECT_TRUE(std::isnan(group_value(c.form, group_scale(c.form, amax, 1.0F), NAN))) << amax;
    }
  }
}

// Rows of every quantised format as the general experts have them: codes and scales of the
// reference, bit for bit, and their products.
TEST(CudaCodes, RowValuesAreTheReferences) {
  EXPECT_FALSE(value_rule(test::scheme_called("bf16").activation).has_value());
  test::Rng rng(8);
  for (const char* quant : {"fp8-block", "fp8-channel", "fp8-static", "int8", "mxfp8", "mxfp4",
                            "mxfp4-fp8", "nvfp4", "mxfp4-f32-groups", "mxfp4-token",
                            "fp8-block-64x48", "int4-g128-int8", "mxfp4-int8", "q6k-int8"}) {
    const OperandQuant activation = test::scheme_called(quant).activation;
    const ValueRule rule = value_rule(activation).value();
    ASSERT_EQ(rule.fixed, quant::has_static_scale(activation)) << quant;
    ASSERT_EQ(rule.columns,
              activation.granularity == ScaleGranularity::kGroup ? activation.block_k : 0)
        << quant;
    const std::int64_t n = rule.columns > 0 ? rule.columns : 100;
    for (int round = 0; round < 4000; ++round) {
      std::vector<float> row(static_cast<std::size_t>(n));
      const double size = round % 3 == 0 ? 1.0 : std::exp2(rng.integer(-100, 100));
      for (float& v : row) {
        const double x = rng.integer(0, 2) == 0 ? static_cast<double>(rng.integer(-64, 64)) / 4
                                                : rng.uniform() * 16 - 8;
        v = static_cast<float>(rng.integer(0, 5) == 0 ? 0.0 : x * size);
      }
      if (round == 0) row.assign(row.size(), 0.0F);
      if (round == 1) row.assign(row.size(), 1e-40F);
      const float fixed = static_cast<float>(std::exp2(rng.uniform() * 20 - 15));
      float amax = 0;
      for (const float v : row) amax = std::max(amax, std::abs(v));
      const ValueScale scale = value_scale(rule, amax, fixed);
      std::vector<float> want = row, scales(static_cast<std::size_t>(n));
      std::vector<std::uint8_t> scratch(row.size());
      const experts::RefOperand operand = experts::ref_quantize_row(
          activation, fixed, want.data(), n, scales.data(), scratch.data());
      for (std::size_t i = 0; i < row.size(); ++i) {
        const float got = row_value(rule, scale, fixed, row[i]);
        ASSERT_EQ(got, operand.values[i] * operand.scales[0] * operand.outer)
            << quant << ' ' << round << ' ' << i << ' ' << row[i];
      }
    }
    // NaN has no int8 code: the group's largest magnitude is NaN there, and all its values.
    for (const float amax : {0.0F, 1.0F}) {
      const bool int8 = activation.dtype == DType::kI8;
      const ValueScale scale = value_scale(rule, int8 ? NAN : amax, 1.0F);
      EXPECT_TRUE(std::isnan(row_value(rule, scale, 1.0F, NAN))) << quant << ' ' << amax;
      EXPECT_EQ(std::isnan(row_value(rule, scale, 1.0F, 0.5F)), int8) << quant << ' ' << amax;
    }
  }
}

}  // namespace
}  // namespace moesaic::cuda
