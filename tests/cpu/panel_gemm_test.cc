// Panel GEMMs of every tier, weight kind, scale format and height against float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "numerics/codec.h"
#include "numerics/element.h"
#include "support/random.h"
#include "tile_model_kernels.h"

namespace moesaic::cpu {
namespace {

// fold 0: the plain GEMM, scales per 16 columns and 128 steps. Else the grouped one.
struct GemmCase {
  WeightKind kind;
  bool bf16_operand;
  int fold = 0;
  GroupScaleForm format = GroupScaleForm::kNone;
  bool offsets = false;
  int folds_per_row_scale = 0;  // grouped: 0: no row scales
  bool integers = false;
  int largest_e4m3 = 0x7E;  // code of a group's scale
};

// The codes of kCode4 in these tests: int4.
std::array<float, 16> int4_values() {
  std::array<float, 16> values{};
  for (std::size_t c = 0; c < 16; ++c)
    values[c] = static_cast<float>(i4_from_nibble(static_cast<std::uint8_t>(c)));
  return values;
}

double value_of(WeightKind kind, const std::byte* matrix, std::int64_t i) {
  switch (kind) {
    case WeightKind::kF32:
      return static_cast<double>(load_as_f32(matrix, DType::kF32, i));
    case WeightKind::kBF16:
      return static_cast<double>(load_as_f32(matrix, DType::kBF16, i));
    case WeightKind::kF16:
      return static_cast<double>(load_as_f32(matrix, DType::kF16, i));
    case WeightKind::kCode4:
    case WeightKind::kInt4Fp8:
    case WeightKind::kI4Quads:
    case WeightKind::kE2M1Quads:
      return i4_from_nibble(nibble_at(reinterpret_cast<const std::uint8_t*>(matrix), i));
    case WeightKind::kI8:
    case WeightKind::kI6:
    case WeightKind::kI8Quads:
    case WeightKind::kI6Quads:
      return static_cast<std::int8_t>(matrix[i]);
    case WeightKind::kE4M3:
      break;
  }
  return static_cast<double>(load_as_f32(matrix, DType::kF8E4M3, i));
}

std::vector<std::byte> random_matrix(test::Rng& rng, WeightKind kind, std::int64_t n,
                                     bool integers) {
  const bool six = kind == WeightKind::kI6 || kind == WeightKind::kI6Quads;  // in bytes
  const std::int64_t bits = six ? 8 : PackedShape{kind, RowOrder::kPlain, 1, 1}.elem_bits();
  std::vector<std::byte> m(static_cast<std::size_t>(n * bits / 8));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t integer = rng.integer(-3, 3);
    const auto x = static_cast<float>(integers ? static_cast<double>(integer) : rng.normal());
    std::byte* at = &m[static_cast<std::size_t>(i * bits / 8)];
    const std::uint16_t half = kind == WeightKind::kF16 ? f16_from_f32(x) : bf16_from_f32(x);
    const auto any = static_cast<std::uint8_t>(rng.next());  // every code, all but NaN
    const auto e4m3 = static_cast<std::uint8_t>((any & 0x7F) == 0x7F ? 0 : any);
    switch (kind) {
      case WeightKind::kF32:
        std::memcpy(at, &x, 4);
        break;
      case WeightKind::kBF16:
      case WeightKind::kF16:
        std::memcpy(at, &half, 2);
        break;
      case WeightKind::kCode4:
      case WeightKind::kInt4Fp8:
      case WeightKind::kI4Quads:
      case WeightKind::kE2M1Quads:
        set_nibble(reinterpret_cast<std::uint8_t*>(m.data()), i,
                   integers ? static_cast<std::uint8_t>(static_cast<int>(integer) & 15) : any);
        break;
      case WeightKind::kI6:
      case WeightKind::kI6Quads:
        *at = static_cast<std::byte>(integers ? static_cast<int>(integer) : (any & 63) - 32);
        break;
      case WeightKind::kI8:
      case WeightKind::kI8Quads:
        *at = static_cast<std::byte>(integers ? static_cast<std::uint8_t>(integer) : any);
        break;
      case WeightKind::kE4M3:
        *at = static_cast<std::byte>(integers ? e4m3_from_f32(x) : e4m3);
        break;
    }
  }
  return m;
}

// Everything but the weights and rows, drawn for one case.
struct Scales {
  std::vector<float> panel, rows, sums, offsets;
  std::vector<std::byte> group;
  std::vector<double> group_values;
};

Scales draw_scales(test::Rng& rng, const GemmCase& c, std::int64_t padded, int num_rows) {
  Scales s;
  const bool grouped = c.fold > 0;
  const std::int64_t step = grouped ? c.fold : kGroup;
  const std::int64_t groups = (padded + step - 1) / step;
  const auto draw = [&](double exact) {
    return c.integers ? static_cast<float>(exact) : static_cast<float>(0.5 + rng.uniform());
  };
  s.panel.resize(static_cast<std::size_t>(grouped ? 0 : groups * 4));
  for (float& v : s.panel) v = draw(0.5);
  s.rows.resize(static_cast<std::size_t>(num_rows * groups));
  for (float& v : s.rows) v = draw(2.0);
  const std::int64_t cells = grouped ? groups * kPanelColumns : 0;
  for (std::int64_t i = 0; i < cells; ++i) {
    float value = 1.0F;
    if (c.format == GroupScaleForm::kF32) {
      value = draw(0.5);
      const auto* bytes = reinterpret_cast<const std::byte*>(&value);
      s.group.insert(s.group.end(), bytes, bytes + 4);
    } else if (bytes_of(c.format) == 2) {
      const DType dtype = c.format == GroupScaleForm::kF16 ? DType::kF16 : DType::kBF16;
      const std::size_t at = s.group.size();
      s.group.resize(at + 2);
      // Also a subnormal number of F16.
      store_from_f32(&s.group[at], dtype, 0, !c.integers && i == 3 ? 0x1p-20F : draw(0.5));
      value = load_as_f32(&s.group[at], dtype, 0);
    } else if (c.format != GroupScaleForm::kNone) {
      // E8M0 from the largest product's to a subnormal factor; every finite e4m3 code.
      auto code =
          static_cast<std::uint8_t>(c.integers ? rng.integer(126, 128) : rng.integer(100, 140));
      if (!c.integers && i == 3) code = 0;
      if (c.format == GroupScaleForm::kE4M3)
        code = static_cast<std::uint8_t>(c.integers ? 0x30 + 8 * rng.integer(0, 2)
                                                    : rng.integer(0, c.largest_e4m3));
      value = c.format == GroupScaleForm::kE4M3 ? f32_from_e4m3(code) : f32_from_e8m0(code);
      s.group.push_back(static_cast<std::byte>(code));
    }
    s.group_values.push_back(static_cast<double>(value));
    s.offsets.push_back(c.integers ? static_cast<float>(rng.integer(-2, 2)) * 0.5F
                                   : static_cast<float>(rng.normal()));
  }
  return s;
}

void check_gemm(const CpuKernels& k, const GemmCase& c, std::int64_t depth, int rows) {
  test::Rng rng(static_cast<std::uint64_t>(depth * 1000 + rows));
  const bool grouped = c.fold > 0;
  const PackedShape shape{
      c.kind, RowOrder::kPlain, kPanelColumns, depth, grouped ? std::max(c.fold, 4) : 4, 0};
  const std::vector<std::byte> matrix =
      random_matrix(rng, c.kind, depth * kPanelColumns, c.integers);
  // Followed by nothing: a read past the panel is caught by the sanitizer build.
  WeightBuffer packed = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  pack_matrix(shape, matrix.data(), packed.data(), 1);
  const std::int64_t padded = shape.padded_k();
  const std::int64_t step = grouped ? c.fold : kGroup;
  const std::int64_t groups = (padded + step - 1) / step;
  Scales s = draw_scales(rng, c, padded, rows);
  const auto elements = static_cast<std::size_t>(rows * padded);
  std::vector<float> f32(elements, 0.0F);
  std::vector<std::uint16_t> b16(elements, 0);
  s.sums.assign(static_cast<std::size_t>(rows * groups), 0.0F);
  for (int r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < depth; ++i) {
      const double x = c.integers ? static_cast<double>(rng.integer(-3, 3)) : rng.normal();
      const auto at = static_cast<std::size_t>(r * padded + i);
      b16[at] = bf16_from_f32(static_cast<float>(x));
      f32[at] = f32_from_bf16(b16[at]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    k.group_sums(&f32[static_cast<std::size_t>(r * padded)], padded, step,
                 &s.sums[static_cast<std::size_t>(r * groups)]);
  }
  const bool row_scales = !grouped || c.folds_per_row_scale > 0;
  const std::int64_t per = grouped ? std::max(c.folds_per_row_scale, 1) : 1;
  std::vector<const void*> row_ptr;
  std::vector<const float*> scale_ptr, sum_ptr;
  for (int r = 0; r < rows; ++r) {
    const auto first = static_cast<std::size_t>(r * padded);
    row_ptr.push_back(c.bf16_operand ? static_cast<const void*>(&b16[first])
                                     : static_cast<const void*>(&f32[first]));
    scale_ptr.push_back(&s.rows[static_cast<std::size_t>(r * groups)]);
    sum_ptr.push_back(&s.sums[static_cast<std::size_t>(r * groups)]);
  }
  Tensor result = Tensor::uninitialized(DType::kF32, {kMaxRows, kPanelColumns}).value();
  test::poison(result.view());
  const CodeTable4 codes = make_code_table(int4_values());
  PanelArgs args;
  args.panel = packed.data();
  args.panel_scales = grouped ? nullptr : s.panel.data();
  args.group_scales = s.group.data();
  args.group_scale_form = c.format;
  args.fold = grouped ? c.fold : kGroup;
  args.group_offsets = c.offsets ? s.offsets.data() : nullptr;
  args.row_sums = sum_ptr.data();
  args.folds_per_row_scale = static_cast<int>(per);
  args.codes = &codes;
  if (c.kind == WeightKind::kInt4Fp8) {
    args.products = &int4_products();
    args.group_scale_form = GroupScaleForm::kNone;
  }
  args.rows = row_ptr.data();
  args.row_scales = row_scales ? scale_ptr.data() : nullptr;
  args.num_rows = rows;
  args.padded_k = padded;
  args.result = result.as<float>();
  const auto& table = grouped ? (c.bf16_operand ? k.grouped_gemm_bf16 : k.grouped_gemm_f32)
                              : (c.bf16_operand ? k.panel_gemm_bf16 : k.panel_gemm_f32);
  ASSERT_NE(table[c.kind], nullptr) << k.name << " kind " << static_cast<int>(c.kind);
  table[c.kind](args);
  double err = 0, ref = 0;
  for (int r = 0; r < rows; ++r) {
    for (std::int64_t col = 0; col < kPanelColumns; ++col) {
      double want = 0, magnitude = 0;
      for (std::int64_t i = 0; i < depth; ++i) {
        const std::int64_t g = i / step;
        const auto cell = static_cast<std::size_t>(g * kPanelColumns + col);
        const double column =
            grouped ? s.group_values[cell]
                    : static_cast<double>(s.panel[static_cast<std::size_t>(g * 4 + col / 16)]);
        const double row =
            row_scales ? static_cast<double>(s.rows[static_cast<std::size_t>(r * groups + g / per)])
                       : 1.0;
        const auto x = static_cast<double>(f32[static_cast<std::size_t>(r * padded + i)]);
        double weight = value_of(c.kind, matrix.data(), col * depth + i) * column;
        if (c.kind == WeightKind::kInt4Fp8)
          weight = static_cast<double>(f32_from_e4m3(e4m3_from_f32(static_cast<float>(weight))));
        const double term = x * weight * row;
        const double away = c.offsets ? x * static_cast<double>(s.offsets[cell]) : 0.0;
        want += term - away;
        magnitude += std::fabs(term) + std::fabs(away);
      }
      const double got = static_cast<double>(args.result[r * kPanelColumns + col]);
      if (c.integers) {
        ASSERT_EQ(got, want) << k.name << " row " << r << " column " << col;
      }
      // The documented bound of one dot product.
      const double bound =
          (static_cast<double>(std::min<std::int64_t>(depth, 128) + 2 * groups) + 2) * 0x1p-24 *
          magnitude;
      ASSERT_LE(std::fabs(got - want), bound)
          << k.name << " kind " << static_cast<int>(c.kind) << " fold " << c.fold << " K " << depth
          << " row " << r << " column " << col << " got " << got << " want " << want;
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

// Plain GEMMs of every kind, and grouped ones that between them have every kind, fold, scale
// format, offsets and row scales.
std::vector<GemmCase> cases(const CpuKernels& k, bool integers) {
  std::vector<GemmCase> all;
  using W = WeightKind;
  using F = GroupScaleForm;
  for (const W kind : {W::kF32, W::kBF16, W::kF16, W::kE4M3})
    all.push_back({kind, false, 0, F::kNone, false, 0, integers});
  const GemmCase grouped[] = {
      {W::kCode4, false, 32, F::kE8M0, false, 0},
      {W::kCode4, false, 16, F::kE4M3, false, 0},
      {W::kCode4, false, 16, F::kE4M3, false, 1},
      {W::kCode4, false, 128, F::kF32, true, 0},
      {W::kCode4, false, 64, F::kF32, false, 0},
      {W::kCode4, false, 32, F::kE8M0, false, 4},
      {W::kE4M3, false, 32, F::kE8M0, false, 1},
      {W::kCode4, false, 32, F::kF16, false, 0},
      {W::kCode4, false, 32, F::kBF16, true, 1},
      {W::kI8, false, 32, F::kF16, true, 0},
      {W::kI8, false, 16, F::kBF16, false, 0},
      {W::kI8, false, 128, F::kNone, false, 0},
      {W::kI8, false, 16, F::kF32, false, 0},
      {W::kI8, false, 16, F::kF32, true, 0},
      {W::kI6, false, 128, F::kNone, false, 0},
      {W::kI6, false, 16, F::kF32, false, 0},
      {W::kI6, false, 32, F::kF32, true, 1},
      // Products of many columns saturate, of a column in every second group, of none; subnormals.
      {W::kInt4Fp8, false, 128, F::kE4M3, false, 0},
      {W::kInt4Fp8, false, 128, F::kE4M3, false, 0, false, 0x67},
      {W::kInt4Fp8, false, 128, F::kE4M3, false, 0, false, 0x66},
      {W::kInt4Fp8, false, 128, F::kE4M3, false, 0, false, 0x0F}};
  for (GemmCase c : grouped) {
    c.integers = integers;
    all.push_back(c);
  }
  std::vector<GemmCase> both = all;
  for (GemmCase c : all) {
    c.bf16_operand = true;
    const auto& table = c.fold > 0 ? k.grouped_gemm_bf16 : k.panel_gemm_bf16;
    if (table[c.kind] != nullptr) both.push_back(c);
  }
  return both;
}

TEST(PanelGemm, MeetsItsBoundForEveryKindDepthAndHeight) {
  for (const CpuKernels* k : tiers_and_model()) {
    for (const GemmCase& c : cases(*k, false)) {
      for (const std::int64_t depth :
           {std::int64_t{4}, std::int64_t{128}, std::int64_t{300}, std::int64_t{130}}) {
        for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 19, 37, 96})
          check_gemm(*k, c, depth, rows);
      }
    }
  }
}

TEST(PanelGemm, IsExactOnIntegers) {
  for (const CpuKernels* k : tiers_and_model()) {
    for (const GemmCase& c : cases(*k, true)) {
      for (const int rows : {1, 4, 9}) check_gemm(*k, c, 260, rows);
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu
