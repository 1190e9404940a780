// Scales of super-blocks: what comes out of the packed form is what the F32 form held.
#include "cpu/super_scales.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "available_tiers.h"
#include "numerics/codec.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

int any_super_code(test::Rng& rng, int bits) {
  return static_cast<int>(bits == 6 ? rng.integer(0, 63) : rng.integer(-128, 127));
}

struct SuperScaleCase {
  SuperScaleForm form;
  std::int64_t fold;
  int bias;
  RowOrder order;
  std::int64_t rows, k;
};
const SuperScaleCase kSuperScaleCases[] = {
    {{6, 32, true}, 32, 8, RowOrder::kGateUp, 2 * 40, 512},   // Q4_K
    {{6, 32, true}, 32, 0, RowOrder::kPlain, 70, 288},        // Q5_K, a part of a super-block
    {{8, 16, false}, 16, 0, RowOrder::kGateUp, 2 * 33, 528},  // Q6_K
    {{8, 16, true}, 16, 0, RowOrder::kPlain, 64, 1024},       // Q4_K beside Q6_K
    {{6, 16, true}, 16, 8, RowOrder::kPlain, 20, 256},        // Q2_K
    {{8, 32, false}, 16, 8, RowOrder::kPlain, 65, 50},        // two groups per scale, ragged
};

std::vector<float> drawn_scales(test::Rng& rng, const SuperScaleCase& c) {
  const std::int64_t across = ceil_div(c.k, c.form.group);
  std::vector<float> v(static_cast<std::size_t>(c.rows * across));
  float unit = 1;
  for (std::int64_t i = 0; i < c.rows * across; ++i) {
    if (i % across % c.form.groups() == 0)
      unit = f32_from_f16(f16_from_f32(static_cast<float>(rng.normal())));
    v[static_cast<std::size_t>(i)] = unit * static_cast<float>(any_super_code(rng, c.form.bits));
  }
  return v;
}

TEST(SuperScales, ExpandToTheScalesAndOffsetsThatTheyStandFor) {
  test::Rng rng(2);
  for (const SuperScaleCase& c : kSuperScaleCases) {
    const PackedShape shape{WeightKind::kI8, c.order, c.rows, c.k, c.fold};
    const std::vector<float> scale = drawn_scales(rng, c), min = drawn_scales(rng, c);
    const Shape grid{c.rows, ceil_div(c.k, c.form.group)};
    const ConstTensorView scales(reinterpret_cast<const std::byte*>(scale.data()), DType::kF32,
                                 grid);
    ConstTensorView minima;
    if (c.form.minima) minima = {reinterpret_cast<const std::byte*>(min.data()), DType::kF32, grid};
    const std::int64_t groups = shape.padded_k() / c.fold, cells = groups * kPanelColumns;
    const auto all = static_cast<std::size_t>(cells * shape.num_panels());
    std::vector<float> want_scales(all), want_offsets(all);
    pack_group_scales(shape, c.fold, {1, c.form.group}, GroupScaleForm::kF32, scales,
                      reinterpret_cast<std::byte*>(want_scales.data()));
    pack_group_offsets(shape, c.fold, c.form.group, scales, {}, minima, c.bias,
                       want_offsets.data());
    const std::int64_t bytes = c.form.panel_bytes(shape.padded_k());
    std::vector<std::byte> compact(static_cast<std::size_t>(bytes * shape.num_panels()));
    test::poison(compact.data(), static_cast<std::int64_t>(compact.size()));
    ASSERT_EQ(pack_super_scales(shape, c.form, scales, minima, compact.data(), 2), -1);
    for (const CpuKernels* k : tiers()) {
      for (std::int64_t p = 0; p < shape.num_panels(); ++p) {
        std::vector<float> got_scales(static_cast<std::size_t>(cells)), got_offsets = got_scales;
        SuperScaleArgs args;
        args.form = c.form;
        args.compact = compact.data() + p * bytes;
        args.per_scale = static_cast<int>(c.form.group / c.fold);
        args.bias = static_cast<float>(c.bias);
        args.groups = groups;
        args.scales = got_scales.data();
        args.offsets = got_offsets.data();
        k->expand_super_scales(args);
        for (std::int64_t i = 0; i < cells; ++i) {
          const auto at = static_cast<std::size_t>(i), in = static_cast<std::size_t>(p * cells + i);
          const bool padding = shape.source_row(p, static_cast<int>(i % kPanelColumns)) < 0;
          ASSERT_EQ(got_scales[at], padding ? 0.0F : want_scales[in]) << k->name << " " << i;
          ASSERT_EQ(got_offsets[at], want_offsets[in]) << k->name << " " << i;
        }
      }
    }
  }
}

TEST(SuperScales, TheFirstBlockThatIsNoneIsNamed) {
  test::Rng rng(3);
  const SuperScaleCase& c = kSuperScaleCases[0];
  const PackedShape shape{WeightKind::kCode4, c.order, c.rows, c.k, c.fold};
  std::vector<float> scale = drawn_scales(rng, c);
  const std::vector<float> min = drawn_scales(rng, c);
  scale[16 * 41 + 8 + 3] = 0.3F;  // row 41 (up), second super-block
  scale[16 * 50] = 0.3F;
  const auto view = [&](const std::vector<float>& v) {
    return ConstTensorView(reinterpret_cast<const std::byte*>(v.data()), DType::kF32, {80, 16});
  };
  std::vector<std::byte> dst(
      static_cast<std::size_t>(c.form.panel_bytes(c.k) * shape.num_panels()));
  EXPECT_EQ(pack_super_scales(shape, c.form, view(scale), view(min), dst.data(), 2), 41 * 2 + 1);
}

// Codes and scales of whole super-blocks, against a block of the file: Q4_K has 144 bytes, Q6_K 210.
TEST(SuperScales, PackedFormsAreNoLargerThanTheFile) {
  const PackedShape q4{WeightKind::kCode4, RowOrder::kPlain, kPanelColumns, 512, 32};
  const PackedShape q6{WeightKind::kI6, RowOrder::kPlain, kPanelColumns, 512, 16};
  const PackedShape quads{WeightKind::kI6Quads, RowOrder::kPlain, kPanelColumns, 512, 16};
  const SuperScaleForm with_minima{6, 32, true}, without{8, 16, false};
  EXPECT_EQ(q4.panel_bytes() + with_minima.panel_bytes(512), 64 * 2 * 144);
  EXPECT_EQ(q6.panel_bytes() + without.panel_bytes(512), 64 * 2 * 210);
  EXPECT_EQ(q6.panel_bytes(), quads.panel_bytes());
}

}  // namespace
}  // namespace moesaic::cpu
