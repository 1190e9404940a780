#include "quant/int_group.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/codec.h"
#include "quant/fp8_scaled.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::poisoned;

std::int64_t groups_of(const Tensor& x, std::int64_t group) {
  const std::int64_t k = x.shape()[1];
  return group == -1 ? 1 : (k + group - 1) / group;
}
struct IntGroups {
  Tensor codes, scale, zeros;
};
IntGroups quantize(const Tensor& x, const quant::IntGroupFormat& f, bool zero_points = false,
                   DType scale_dtype = DType::kF32) {
  const Shape grid{x.shape()[0], groups_of(x, f.group)};
  IntGroups r{poisoned(zero_points ? DType::kU8 : DType::kI8, x.shape()),
              poisoned(scale_dtype, grid), zero_points ? poisoned(DType::kU8, grid) : Tensor()};
  const Status s =
      zero_points
          ? quant::quantize_uint_group(x.view(), f, r.codes.view(), r.scale.view(), r.zeros.view())
          : quant::quantize_int_group(x.view(), f, r.codes.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Tensor dequantize(const IntGroups& r, std::int64_t group) {
  Tensor out = poisoned(DType::kF32, r.codes.shape());
  const Status s = quant::dequantize_int_group(
      r.codes.view(), r.scale.view(), r.zeros.present() ? r.zeros.view() : ConstTensorView(), group,
      out.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

TEST(IntGroup, ErrorOnNormalDataIsTheFormats) {
  const Tensor x = test::gaussian();
  struct Row {
    quant::IntGroupFormat format;
    bool zero_points;
    double error;
  };
  constexpr auto kLargest = quant::IntScaleRule::kLargestCode;
  constexpr auto kBoth = quant::IntScaleRule::kBothEnds;
  constexpr auto kFull = quant::IntScaleRule::kFullRange;
  for (const Row& row : {
           Row{{8, -1, kLargest}, false, 0.0078},
           Row{{8, 128, kLargest}, false, 0.0064},
           Row{{4, 32, kBoth}, false, 0.0917},
           Row{{4, 64, kBoth}, false, 0.1018},
           Row{{4, 128, kBoth}, false, 0.1112},
           Row{{4, 32, kFull}, false, 0.0944},
           Row{{4, 128, kFull}, false, 0.1103},
           Row{{4, 32, kFull}, true, 0.0807},
           Row{{4, 128, kFull}, true, 0.1004},
       }) {
    const IntGroups once = quantize(x, row.format, row.zero_points);
    const Tensor back = dequantize(once, row.format.group);
    EXPECT_NEAR(test::rel_l2(back, x) / row.error, 1.0, 0.02)
        << row.format.bits << ' ' << row.format.group << ' ' << row.zero_points;
  }
}

// Symmetric scales of largest-code form reproduce themselves, so codes do.
TEST(IntGroup, CodesAreStable) {
  const Tensor x = test::gaussian(9);
  for (const int bits : {4, 8}) {
    const quant::IntGroupFormat f{bits, 128, quant::IntScaleRule::kLargestCode};
    const IntGroups once = quantize(x, f);
    std::string why;
    EXPECT_TRUE(
        test::same_bits(quantize(dequantize(once, 128), f).codes.view(), once.codes.view(), &why))
        << why;
  }
}

// Weights that were quantised before lie on a grid: -8..7 times a scale. Against amax / 7.5 = 8
// / 7.5 of that scale every value is stretched by 7 %; refitted scales find the grid again.
TEST(IntGroup, RefittedScalesFindAnOlderGrid) {
  std::vector<float> values(64);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>(i * 5 % 14) - 6) * (i < 32 ? 0.01F : 0.25F);
  }
  Tensor x = Tensor::zeros(DType::kF32, {1, 64}).value();
  std::copy(values.begin(), values.end(), x.as<float>());
  IntGroups r = quantize(x, {4, 32, quant::IntScaleRule::kFullRange});
  EXPECT_LT(r.scale.as<float>()[1], 0.24F);
  ASSERT_TRUE(quant::refit_int_scales(x.view(), r.codes.view(), 32, r.scale.view()).ok());
  EXPECT_FLOAT_EQ(r.scale.as<float>()[0], 0.01F);
  EXPECT_EQ(r.scale.as<float>()[1], 0.25F);
  // Nothing to fit: the scale stays.
  const Tensor zero = Tensor::zeros(DType::kF32, {1, 64}).value();
  IntGroups none = quantize(zero, {4, 32, quant::IntScaleRule::kFullRange});
  const float before = none.scale.as<float>()[0];
  ASSERT_TRUE(quant::refit_int_scales(zero.view(), none.codes.view(), 32, none.scale.view()).ok());
  EXPECT_EQ(none.scale.as<float>()[0], before);
}

TEST(IntGroup, SmallExamples) {
  // amax 7 / 7 = 1: the values are the codes, ties to even.
  const Tensor x = test::f32_of({1, 6}, {7, -7, 2.5F, 3.5F, -0.5F, -6.6F});
  const IntGroups r = quantize(x, {4, -1, quant::IntScaleRule::kLargestCode});
  EXPECT_EQ(r.scale.as<float>()[0], 1.0F);
  const int want[] = {7, -7, 2, 4, 0, -7};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(r.codes.as<std::int8_t>()[i], want[i]) << i;
  // Full range: 7.5 / 7.5 = 1; +7.5 clips to 7, -7.5 is -8.
  const Tensor y = test::f32_of({1, 3}, {7.5F, -7.5F, 1});
  const IntGroups full = quantize(y, {4, -1, quant::IntScaleRule::kFullRange});
  EXPECT_EQ(full.scale.as<float>()[0], 1.0F);
  EXPECT_EQ(full.codes.as<std::int8_t>()[0], 7);
  EXPECT_EQ(full.codes.as<std::int8_t>()[1], -8);
  // Both ends: -8 and 7 are codes of scale 1; symmetric 8 / 7 would be coarser.
  const IntGroups both =
      quantize(test::f32_of({1, 3}, {7, -8, 1}), {4, -1, quant::IntScaleRule::kBothEnds});
  EXPECT_EQ(both.scale.as<float>()[0], 1.0F);
  EXPECT_EQ(both.codes.as<std::int8_t>()[1], -8);
  // Zero points: the range -2 .. 13 is codes 0 .. 15, zero is code 2.
  const Tensor z = test::f32_of({1, 4}, {-2, 13, 0, 5.4F});
  const IntGroups asym = quantize(z, {4, -1, {}}, true);
  EXPECT_EQ(asym.scale.as<float>()[0], 1.0F);
  EXPECT_EQ(asym.zeros.as<std::uint8_t>()[0], 2);
  EXPECT_EQ(test::bytes_of(asym.codes), (std::vector<std::uint8_t>{0, 15, 2, 7}));
  EXPECT_EQ(test::to_doubles(dequantize(asym, -1).view()), (std::vector<double>{-2, 13, 0, 5}));
  // All positive and all negative groups still contain zero.
  const IntGroups high = quantize(test::f32_of({2, 2}, {10, 15, -15, -10}), {4, -1, {}}, true);
  EXPECT_EQ(high.zeros.as<std::uint8_t>()[0], 0);
  EXPECT_EQ(high.zeros.as<std::uint8_t>()[1], 15);
  EXPECT_EQ(test::to_doubles(dequantize(high, -1).view()), (std::vector<double>{10, 15, -15, -10}));
}

TEST(IntGroup, RaggedGroupsRowsOfZerosAndNarrowScales) {
  test::Rng rng(5);
  const Tensor x = test::random_normal(rng, DType::kBF16, {3, 77});
  for (const DType scale_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool zero_points : {false, true}) {
      const IntGroups r =
          quantize(x, {4, 32, quant::IntScaleRule::kFullRange}, zero_points, scale_dtype);
      EXPECT_EQ(r.scale.shape(), Shape({3, 3}));
      // The last group has 13 columns; it is quantised as if alone.
      Tensor tail = Tensor::zeros(DType::kBF16, {1, 13}).value();
      std::memcpy(tail.data(), x.as<std::uint16_t>() + 77 + 64, 26);
      const IntGroups alone =
          quantize(tail, {4, -1, quant::IntScaleRule::kFullRange}, zero_points, scale_dtype);
      EXPECT_EQ(std::memcmp(alone.codes.data(), r.codes.data() + 77 + 64, 13), 0);
      EXPECT_LT(
          test::compare(test::to_doubles(dequantize(r, 32).view()), test::to_doubles(x.view()))
              .rel_l2,
          0.11);
    }
  }
  const Tensor zero = Tensor::zeros(DType::kF32, {2, 8}).value();
  const IntGroups r = quantize(zero, {4, 4, {}}, true);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(r.scale.as<float>()[i], 1.0F);
  EXPECT_EQ(test::to_doubles(dequantize(r, 4).view()), std::vector<double>(16, 0.0));
}

TEST(IntGroup, Int8RowsAreTheRowQuantiser) {
  test::Rng rng(6);
  const Tensor x = test::random_normal(rng, DType::kF32, {4, 100});
  const IntGroups r = quantize(x, {8, -1, quant::IntScaleRule::kLargestCode});
  for (std::int64_t m = 0; m < 4; ++m) {
    float amax = 0;
    for (int i = 0; i < 100; ++i) amax = std::max(amax, std::abs(x.as<float>()[m * 100 + i]));
    EXPECT_EQ(r.scale.as<float>()[m], amax / 127.0F);
    EXPECT_EQ(r.scale.as<float>()[m], quant::int8_row_scale(amax));
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(r.codes.as<std::int8_t>()[m * 100 + i],
                i8_from_f32(x.as<float>()[m * 100 + i] / (amax / 127.0F)));
    }
  }
  EXPECT_EQ(quant::int8_row_scale(0.0F), 1.0F);
  // dequantize_scaled reads the same thing.
  Tensor a = poisoned(DType::kF32, {4, 100});
  TensorView rows(r.scale.view().data == nullptr ? nullptr : const_cast<std::byte*>(r.scale.data()),
                  DType::kF32, {4});
  ASSERT_TRUE(quant::dequantize_scaled(r.codes.view(), rows, a.view()).ok());
  std::string why;
  EXPECT_TRUE(test::same_bits(a.view(), dequantize(r, -1).view(), &why)) << why;
}

TEST(IntGroup, Misuse) {
  Tensor x = Tensor::zeros(DType::kF32, {2, 8}).value();
  Tensor codes = Tensor::zeros(DType::kI8, {2, 8}).value();
  Tensor scale = Tensor::zeros(DType::kF16, {2, 2}).value();
  const quant::IntGroupFormat f{4, 4, quant::IntScaleRule::kLargestCode};
  EXPECT_TRUE(quant::quantize_int_group(x.view(), f, codes.view(), scale.view()).ok());
  expect_refusal(quant::quantize_int_group(x.view(), {9, 4, {}}, codes.view(), scale.view()),
                 StatusCode::kInvalidArgument, {"bits", "9", "2 .. 8"});
  expect_refusal(quant::quantize_int_group(x.view(), {4, 0, {}}, codes.view(), scale.view()),
                 StatusCode::kInvalidArgument, {"group", "0", "-1"});
  expect_refusal(quant::quantize_int_group(x.view(), {4, 3, {}}, codes.view(), scale.view()),
                 StatusCode::kInvalidShape, {"scale", "[2, 2]", "[2, 3]"});
  x.as<float>()[9] = 1e9F;
  expect_refusal(quant::quantize_int_group(x.view(), f, codes.view(), scale.view()),
                 StatusCode::kInvalidArgument, {"scale", "finite in F16"});
  x.as<float>()[9] = std::numeric_limits<float>::quiet_NaN();
  expect_refusal(quant::quantize_int_group(x.view(), f, codes.view(), scale.view()),
                 StatusCode::kInvalidArgument, {"x", "row 1, column 1", "NaN"});
  Tensor zeros = Tensor::zeros(DType::kU8, {2, 1}).value();
  expect_refusal(quant::dequantize_int_group(codes.view(), scale.view(), zeros.view(), 4, x.view()),
                 StatusCode::kInvalidShape, {"zeros", "[2, 1]", "[2, 2]"});
}

}  // namespace
}  // namespace moesaic
