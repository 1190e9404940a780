// Every mechanism of every tier of this machine against scalar code and float64.
#include "cpu/kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "activation/ref_activation.h"
#include "cpu/packed_weights.h"
#include "cpu/tiers.h"
#include "numerics/codec.h"
#include "numerics/element.h"
#include "quant/fp8_group.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

std::vector<const CpuKernels*> tiers() {
  std::vector<const CpuKernels*> list;
  for (const TierInfo& t : cpu_tiers()) {
    if (t.available) list.push_back(t.kernels);
  }
  return list;
}

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

TEST(Kernels, GroupQuantisationEqualsTheReference) {
  test::Rng rng(3);
  for (const CpuKernels* k : tiers()) {
    for (int round = 0; round < 50; ++round) {
      std::vector<float> x(384);
      const double sd = std::exp2(rng.integer(-20, 20));
      for (float& v : x) v = static_cast<float>(sd * rng.normal());
      if (round == 0) std::fill(x.begin(), x.begin() + 128, 0.0F);
      std::vector<float> row = x;
      float scales[3];
      const bool power_of_two = round % 2 == 1;
      k->quantize_row_e4m3(row.data(), 384, power_of_two, scales);
      for (std::size_t i = 0; i < x.size(); ++i) {
        float absmax = 0;
        for (std::size_t j = i / 128 * 128; j < i / 128 * 128 + 128; ++j)
          absmax = std::max(absmax, std::fabs(x[j]));
        const float scale = fp8_group_scale(
            absmax, power_of_two ? ScaleRounding::kCeilPowerOfTwo : ScaleRounding::kNone);
        ASSERT_EQ(scales[i / 128], scale) << k->name;
        const float clamped = std::min(std::max(x[i] / scale, -448.0F), 448.0F);
        ASSERT_EQ(row[i], f32_from_e4m3(e4m3_from_f32(clamped)))
            << k->name << " x " << x[i] << " scale " << scale;
      }
    }
  }
}

// Packs a random matrix, multiplies rows, compares with float64; integers must be exact.
struct GemmCase {
  WeightKind kind;
  bool bf16_operand;
};

double value_of(WeightKind kind, const std::byte* matrix, std::int64_t i) {
  switch (kind) {
    case WeightKind::kF32:
      return static_cast<double>(load_as_f32(matrix, DType::kF32, i));
    case WeightKind::kBF16:
      return static_cast<double>(load_as_f32(matrix, DType::kBF16, i));
    case WeightKind::kF16:
      return static_cast<double>(load_as_f32(matrix, DType::kF16, i));
    case WeightKind::kE2M1:
      return static_cast<double>(load_as_f32(matrix, DType::kF4E2M1, i));
    case WeightKind::kE4M3:
      break;
  }
  return static_cast<double>(load_as_f32(matrix, DType::kF8E4M3, i));
}

std::vector<std::byte> random_matrix(test::Rng& rng, WeightKind kind, std::int64_t n,
                                     bool integers) {
  const PackedShape one{kind, RowOrder::kPlain, 1, 1};
  std::vector<std::byte> m(static_cast<std::size_t>(n * one.elem_bits() / 8));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto x =
        static_cast<float>(integers ? static_cast<double>(rng.integer(-3, 3)) : rng.normal());
    if (kind == WeightKind::kF32) std::memcpy(&m[static_cast<std::size_t>(4 * i)], &x, 4);
    const std::uint16_t half = kind == WeightKind::kF16 ? f16_from_f32(x) : bf16_from_f32(x);
    if (one.elem_bits() == 16) std::memcpy(&m[static_cast<std::size_t>(2 * i)], &half, 2);
    if (kind == WeightKind::kE2M1) {  // 0, 1, 2, 3 and their negatives, or any code
      const auto bits = static_cast<unsigned>(rng.next());
      const unsigned code = integers ? "\0\2\4\5"[bits & 3U] | (bits & 8U) : bits & 15U;
      m[static_cast<std::size_t>(i / 2)] |= static_cast<std::byte>(code << (i % 2 * 4));
    }
    // All finite e4m3 codes, subnormals included.
    if (kind == WeightKind::kE4M3) {
      const auto code = static_cast<std::uint8_t>(rng.next() & 0xFF);
      m[static_cast<std::size_t>(i)] = static_cast<std::byte>(integers ? e4m3_from_f32(x)
                                                              : (code & 0x7F) == 0x7F ? 0
                                                                                      : code);
    }
  }
  return m;
}

void check_gemm(const CpuKernels& k, WeightKind kind, bool bf16_operand, std::int64_t depth,
                int rows, bool integers) {
  const bool mx = kind == WeightKind::kE2M1;
  if (mx) depth = depth / 32 * 32 + 32;
  test::Rng rng(static_cast<std::uint64_t>(depth * 1000 + rows));
  const PackedShape shape{kind, RowOrder::kPlain, kPanelColumns, depth};
  const std::vector<std::byte> matrix = random_matrix(rng, kind, depth * kPanelColumns, integers);
  // Followed by nothing: a read past the panel is caught by the sanitizer build.
  WeightBuffer packed = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  pack_matrix(shape, matrix.data(), packed.data(), 1);
  const std::int64_t padded = shape.padded_k(), groups = shape.num_groups();
  const auto elements = static_cast<std::size_t>(rows * padded);
  std::vector<float> f32(elements, 0.0F);
  std::vector<std::uint16_t> b16(elements, 0);
  for (int r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < depth; ++i) {
      const double x = integers ? static_cast<double>(rng.integer(-3, 3)) : rng.normal();
      const auto at = static_cast<std::size_t>(r * padded + i);
      b16[at] = bf16_from_f32(static_cast<float>(x));
      f32[at] = f32_from_bf16(b16[at]);
    }
  }
  std::vector<float> panel_scales(static_cast<std::size_t>(groups * 4)),
      row_scales(static_cast<std::size_t>(rows * groups));
  for (float& s : panel_scales) s = integers ? 0.5F : static_cast<float>(0.5 + rng.uniform());
  for (float& s : row_scales) s = integers ? 2.0F : static_cast<float>(0.5 + rng.uniform());
  // e2m1: exponents of the columns instead, from the largest product's to a subnormal factor.
  std::vector<std::uint8_t> exponents(static_cast<std::size_t>(mx ? padded * 2 : 0));
  for (std::uint8_t& e : exponents) {
    e = static_cast<std::uint8_t>(integers ? rng.integer(126, 128) : rng.integer(100, 140));
  }
  if (mx && !integers) exponents[3] = 0;
  if (mx) panel_scales.assign(panel_scales.size(), 1.0F);
  if (mx) row_scales.assign(row_scales.size(), 1.0F);
  std::vector<const void*> row_ptr;
  std::vector<const float*> scale_ptr;
  for (int r = 0; r < rows; ++r) {
    row_ptr.push_back(bf16_operand
                          ? static_cast<const void*>(&b16[static_cast<std::size_t>(r * padded)])
                          : static_cast<const void*>(&f32[static_cast<std::size_t>(r * padded)]));
    scale_ptr.push_back(&row_scales[static_cast<std::size_t>(r * groups)]);
  }
  Tensor result = Tensor::uninitialized(DType::kF32, {kMaxRows, kPanelColumns}).value();
  test::poison(result.view());
  PanelArgs args;
  args.panel = packed.data();
  args.panel_scales = mx ? nullptr : panel_scales.data();
  args.panel_exponents = mx ? exponents.data() : nullptr;
  args.rows = row_ptr.data();
  args.row_scales = mx ? nullptr : scale_ptr.data();
  args.num_rows = rows;
  args.padded_k = padded;
  args.result = result.as<float>();
  const auto kind_index = static_cast<std::size_t>(kind);
  (bf16_operand ? k.panel_gemm_bf16 : k.panel_gemm_f32)[kind_index](args);
  double err = 0, ref = 0;
  for (int r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < kPanelColumns; ++c) {
      double want = 0, magnitude = 0;
      for (std::int64_t i = 0; i < depth; ++i) {
        const std::int64_t g = i / kGroup;
        const double power =
            mx ? std::ldexp(1.0, exponents[static_cast<std::size_t>(i / 32 * 64 + c)] - 127) : 1.0;
        const double term =
            static_cast<double>(f32[static_cast<std::size_t>(r * padded + i)]) *
            value_of(kind, matrix.data(), c * depth + i) * power *
            static_cast<double>(row_scales[static_cast<std::size_t>(r * groups + g)]) *
            static_cast<double>(panel_scales[static_cast<std::size_t>(g * 4 + c / 16)]);
        want += term;
        magnitude += std::fabs(term);
      }
      const double got = static_cast<double>(args.result[r * kPanelColumns + c]);
      if (integers) {
        ASSERT_EQ(got, want) << k.name << " row " << r << " column " << c;
      }
      // The documented bound of one dot product.
      const std::int64_t folds = mx ? depth / 32 : groups;
      const double bound = (static_cast<double>(std::min<std::int64_t>(depth, 128) + folds) + 2) *
                           0x1p-24 * magnitude;
      ASSERT_LE(std::fabs(got - want), bound)
          << k.name << " kind " << kind_index << " K " << depth << " row " << r << " column " << c
          << " got " << got << " want " << want;
      err += (got - want) * (got - want);
      ref += want * want;
    }
  }
  EXPECT_GT(ref, 0.0);
  EXPECT_LE(std::sqrt(err / ref), 1e-5);
  // Rows beyond num_rows stay as they were.
  std::uint32_t beyond = 0;
  if (rows < kMaxRows) {
    std::memcpy(&beyond, args.result + rows * kPanelColumns, 4);
    EXPECT_EQ(beyond, 0xFFFFFFFFU);
  }
}

TEST(Kernels, PanelGemmMeetsItsBoundForEveryKindDepthAndHeight) {
  for (const CpuKernels* k : tiers()) {
    for (int kind = 0; kind < kNumWeightKinds; ++kind) {
      for (const bool narrow : {false, true}) {
        if (narrow && k->panel_gemm_bf16[kind] == nullptr) continue;
        for (const std::int64_t depth :
             {std::int64_t{4}, std::int64_t{128}, std::int64_t{300}, std::int64_t{129}}) {
          for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 19, 37, 96}) {
            check_gemm(*k, static_cast<WeightKind>(kind), narrow, depth, rows, false);
          }
        }
      }
    }
  }
}

TEST(Kernels, PanelGemmIsExactOnIntegers) {
  for (const CpuKernels* k : tiers()) {
    for (int kind = 0; kind < kNumWeightKinds; ++kind) {
      check_gemm(*k, static_cast<WeightKind>(kind), false, 260, 9, true);
      if (k->panel_gemm_bf16[kind] != nullptr)
        check_gemm(*k, static_cast<WeightKind>(kind), true, 260, 9, true);
    }
  }
}

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
                   .scalar_activation = &ref_activation,
                   .out = out.data(),
                   .out_stride = width});
      for (std::int64_t r = 0; r < 3; ++r) {
        std::vector<double> in(kPanelColumns), want(static_cast<std::size_t>(width));
        for (std::size_t i = 0; i < in.size(); ++i) {
          in[i] = static_cast<double>(
              c.as<float>()[r * kPanelColumns + static_cast<std::int64_t>(i)] + bias[i]);
        }
        ref_activation_f64(spec, gated ? GateUpLayout::kGateThenUp : GateUpLayout::kNonGated,
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
