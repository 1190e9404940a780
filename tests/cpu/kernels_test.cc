// Every mechanism of every tier of this machine against scalar code and float64.
#include "cpu/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "activation/reference/activation.h"
#include "available_tiers.h"
#include "cpu/packed_weights.h"
#include "numerics/codec.h"
#include "numerics/element.h"
#include "quant/fp8_group.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

// Finite fp32 values of every exponent and sign, tie points among them.
std::vector<float> all_kinds_of_floats() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000U; high += 7) {
    for (const std::uint32_t low : {0x0000U, 0x1000U, 0x8000U, 0x8001U, 0xFFFFU}) {
      const float x = std::bit_cast<float>(high << 16 | low);
      if (std::isfinite(x)) values.push_back(x);
    }
  }
  return values;
}

TEST(Kernels, RoundingAndStoringEqualTheScalarCodecs) {
  const std::vector<float> values = all_kinds_of_floats();
  const auto n = static_cast<std::int64_t>(values.size());
  for (const CpuKernels* k : tiers()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      std::vector<float> row = values;
      k->round_row(row.data(), n, dtype);
      std::vector<std::uint16_t> stored(values.size());
      k->store_row(values.data(), n, dtype, stored.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint16_t want =
            dtype == DType::kBF16 ? bf16_from_f32(values[i]) : f16_from_f32(values[i]);
        ASSERT_EQ(stored[i], want) << k->name << " " << dtype_name(dtype) << " " << values[i];
        const float wide = dtype == DType::kBF16 ? f32_from_bf16(want) : f32_from_f16(want);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(row[i]), std::bit_cast<std::uint32_t>(wide))
            << k->name << " " << dtype_name(dtype) << " " << values[i];
      }
    }
  }
}

TEST(Kernels, LoadingWidensEveryCodeAndPads) {
  std::vector<std::uint16_t> codes;
  for (std::uint32_t c = 0; c < 0x10000U; ++c) codes.push_back(static_cast<std::uint16_t>(c));
  codes.resize(codes.size() - 3);  // a tail
  const auto n = static_cast<std::int64_t>(codes.size());
  for (const CpuKernels* k : tiers()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      std::vector<float> row(codes.size() + 5, 1.0F);
      k->load_row(codes.data(), dtype, n, n + 5, row.data());
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const float want = dtype == DType::kBF16 ? f32_from_bf16(codes[i]) : f32_from_f16(codes[i]);
        ASSERT_TRUE(row[i] == want || (std::isnan(row[i]) && std::isnan(want)))
            << k->name << " code " << codes[i];
      }
      for (std::size_t i = codes.size(); i < row.size(); ++i) EXPECT_EQ(row[i], 0.0F);
    }
  }
}

float rounded_to(DType dtype, float x) {
  if (dtype == DType::kBF16) return f32_from_bf16(bf16_from_f32(x));
  return dtype == DType::kF16 ? f32_from_f16(f16_from_f32(x)) : x;
}

// Every column of every row, and nothing between them.
TEST(Kernels, APanelIsStoredToRowsApart) {
  constexpr int kRows = 5;
  constexpr std::int64_t kStride = 3 * kPanelColumns;
  alignas(64) float result[kRows * kPanelColumns];
  for (int i = 0; i < kRows * kPanelColumns; ++i) result[i] = static_cast<float>(i);
  for (const CpuKernels* k : tiers()) {
    for (const bool past_caches : {false, true}) {
      alignas(64) float out[kRows * kStride] = {};
      k->store_panel(result, kRows, past_caches, out + kPanelColumns, kStride);
      for (std::int64_t i = 0; i < kRows * kStride; ++i) {
        const std::int64_t column = i % kStride - kPanelColumns;
        const bool stored = column >= 0 && column < kPanelColumns;
        const float want = stored ? result[i / kStride * kPanelColumns + column] : 0.0F;
        ASSERT_EQ(out[i], want) << k->name << " past_caches " << past_caches << " at " << i;
      }
    }
  }
}

// Rows of two whole groups and a tail, in both scale rules, every rounding before.
TEST(Kernels, GroupQuantisationEqualsTheReference) {
  constexpr std::int64_t kCount = 300;
  test::Rng rng(3);
  for (const CpuKernels* k : tiers()) {
    for (int round = 0; round < 90; ++round) {
      std::vector<float> x(kCount);
      const DType dtype = round % 3 == 0   ? DType::kF32
                          : round % 3 == 1 ? DType::kBF16
                                           : DType::kF16;
      // f16: neither overflow nor a row of zeros.
      const double sd =
          std::exp2(dtype == DType::kF16 ? rng.integer(-10, 10) : rng.integer(-20, 20));
      for (float& v : x) v = static_cast<float>(sd * rng.normal());
      if (round == 0) std::fill(x.begin(), x.begin() + 128, 0.0F);
      const bool power_of_two = round % 2 == 1;
      float scales[3];
      const bool narrow = k->narrow_operand == OperandKind::kBF16;
      std::vector<std::byte> codes((kCount + 1) * (narrow ? 2 : 4), std::byte{0x5A});
      k->quantize_row_e4m3(x.data(), kCount, dtype, power_of_two, scales, codes.data());
      EXPECT_EQ(codes.back(), std::byte{0x5A}) << k->name << ": wrote past the row";
      const DType operand = narrow ? DType::kBF16 : DType::kF32;
      for (std::int64_t i = 0; i < kCount; ++i) {
        float absmax = 0;
        const std::int64_t begin = i / quant::kFp8BlockSize * quant::kFp8BlockSize;
        for (std::int64_t j = begin; j < std::min(begin + quant::kFp8BlockSize, kCount); ++j)
          absmax = std::max(absmax, std::fabs(rounded_to(dtype, x[static_cast<std::size_t>(j)])));
        const float scale =
            quant::fp8_group_scale(absmax, power_of_two ? quant::ScaleRounding::kCeilPowerOfTwo
                                                        : quant::ScaleRounding::kNone);
        ASSERT_EQ(scales[i / quant::kFp8BlockSize], scale) << k->name;
        const float value = rounded_to(dtype, x[static_cast<std::size_t>(i)]);
        const float clamped = std::min(std::max(value / scale, -448.0F), 448.0F);
        ASSERT_EQ(load_as_f32(codes.data(), operand, i), f32_from_e4m3(e4m3_from_f32(clamped)))
            << k->name << " x " << value << " scale " << scale;
      }
    }
  }
}

// With a scale of one, every fp32 number near a code and near the middle of two codes.
TEST(Kernels, CodesOfE4M3AreTheNearest) {
  std::vector<float> values;
  for (int code = 0; code < 0x7F; ++code) {
    const float low = f32_from_e4m3(static_cast<std::uint8_t>(code));
    const float high = code == 0x7E ? low : f32_from_e4m3(static_cast<std::uint8_t>(code + 1));
    for (const float x : {low, low + (high - low) / 2}) {
      for (const float v : {x, std::nextafter(x, 0.0F), std::nextafter(x, 448.0F)}) {
        values.push_back(v);
        values.push_back(-v);
      }
    }
  }
  for (const CpuKernels* k : tiers()) {
    const bool narrow = k->narrow_operand == OperandKind::kBF16;
    for (std::size_t begin = 0; begin < values.size(); begin += 127) {
      std::vector<float> x(128, 448.0F);
      const std::size_t count = std::min<std::size_t>(127, values.size() - begin);
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(begin), count, x.begin());
      float scale = 0;
      std::byte codes[128 * 4];
      k->quantize_row_e4m3(x.data(), 128, DType::kF32, false, &scale, codes);
      ASSERT_EQ(scale, 1.0F);
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(
            load_as_f32(codes, narrow ? DType::kBF16 : DType::kF32, static_cast<std::int64_t>(i)),
            f32_from_e4m3(e4m3_from_f32(x[i])))
            << k->name << " x " << x[i];
      }
    }
  }
}

// Packs a random matrix, multiplies rows, compares with float64; integers must be exact.
TEST(Kernels, ActivationsFollowTheReference) {
  test::Rng rng(9);
  for (const CpuKernels* k : tiers()) {
    for (int kind = 0; kind <= static_cast<int>(ActivationKind::kRelu2NoMul); ++kind) {
      ActivationSpec spec;
      spec.kind = static_cast<ActivationKind>(kind);
      if (spec.kind == ActivationKind::kSwigluOai)
        spec.limit = 7, spec.alpha = 1.702F, spec.beta = 1;
      if (spec.kind == ActivationKind::kSwigluStep) spec.limit = 7;
      if (spec.kind == ActivationKind::kSitu) spec.beta = 4, spec.up_limit = 25;
      const bool gated = is_gated(spec.kind);
      const std::int64_t width = gated ? 32 : 64;
      Tensor c = Tensor::zeros(DType::kF32, {3, kPanelColumns}).value();
      float bias[kPanelColumns];
      for (float& b : bias) b = static_cast<float>(rng.normal());
      for (std::int64_t i = 0; i < 3 * kPanelColumns; ++i)
        c.as<float>()[i] = static_cast<float>(6 * rng.normal());
      c.as<float>()[5] = -200.0F;
      c.as<float>()[6] = 200.0F;
      std::vector<float> out(static_cast<std::size_t>(3 * width));
      k->activate({.c = c.as<float>(),
                   .num_rows = 3,
                   .bias = bias,
                   .activation = spec,
                   .scalar_activation = &activation::ref_activation,
                   .out = out.data(),
                   .out_stride = width});
      for (std::int64_t r = 0; r < 3; ++r) {
        std::vector<double> in(kPanelColumns), want(static_cast<std::size_t>(width));
        for (std::size_t i = 0; i < in.size(); ++i) {
          in[i] = static_cast<double>(
              c.as<float>()[r * kPanelColumns + static_cast<std::int64_t>(i)] + bias[i]);
        }
        activation::ref_activation_f64(spec,
                                       gated ? GateUpLayout::kGateThenUp : GateUpLayout::kNonGated,
                                       in.data(), want.data(), width);
        for (std::size_t i = 0; i < want.size(); ++i) {
          const auto got = static_cast<double>(out[static_cast<std::size_t>(r * width) + i]);
          // A handful of fp32 ulp of the result, times the condition number of the Gaussian tail
          // (its derivative over itself is about g, twice) for gelu; the smallest normal covers
          // results that underflow.
          const bool gaussian = activation_name(spec.kind).find("gelu") != std::string_view::npos;
          const double ulps = 16 + (gaussian ? 2 * in[i] * in[i] : 0);
          ASSERT_NEAR(got, want[i], ulps * 0x1p-24 * std::fabs(want[i]) + 0x1p-120)
              << k->name << " " << activation_name(spec.kind) << " at " << i << " gate " << in[i];
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu
