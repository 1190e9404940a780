#include "quant/fp8_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "numerics/codec.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

struct Fp8Blocks {
  Tensor q, scale;
};
Fp8Blocks quantize(const Tensor& w, quant::BlockShape block = {},
                   quant::ScaleRounding rounding = quant::ScaleRounding::kNone) {
  Fp8Blocks r;
  r.q = Tensor::zeros(DType::kF8E4M3, w.shape()).value();
  r.scale = Tensor::zeros(DType::kF32, quant::block_scale_shape(w.shape(), block).value()).value();
  test::poison(r.q.view());
  test::poison(r.scale.view());
  const Status s = quant::quantize_fp8_block(w.view(), block, rounding, r.q.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Tensor dequantize(const Fp8Blocks& x, quant::BlockShape block = {}) {
  Tensor out = Tensor::zeros(DType::kF32, x.q.shape()).value();
  test::poison(out.view());
  const Status s = quant::dequantize_fp8_block(x.q.view(), x.scale.view(), block, out.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

TEST(Fp8Block, BytesOfASmallTile) {
  // Tiles of 2x2 in a 2x3 matrix: {1, -448, 0.25, 7} and the ragged {0.1, 0}.
  Tensor w = Tensor::zeros(DType::kF32, {2, 3}).value();
  const float values[] = {1, -448, 0.1F, 0.25F, 7, 0};
  std::memcpy(w.data(), values, sizeof values);
  const Fp8Blocks r = quantize(w, {2, 2});
  EXPECT_EQ(r.scale.as<float>()[0], 1.0F);
  EXPECT_EQ(r.scale.as<float>()[1], 0.1F / 448.0F);
  const std::uint8_t want[] = {0x38, 0xFE, 0x7E, 0x28, 0x4E, 0x00};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(r.q.as<std::uint8_t>()[i], want[i]) << i;
  const Fp8Blocks up = quantize(w, {2, 2}, quant::ScaleRounding::kCeilPowerOfTwo);
  EXPECT_EQ(up.scale.as<float>()[0], 1.0F);
  EXPECT_EQ(up.scale.as<float>()[1], 0x1p-12F);  // 0.1/448 = 2.23e-4, next power of two 2.44e-4
}

TEST(Fp8Block, ZeroTilesUseTheFloor) {
  const Tensor w = Tensor::zeros(DType::kF32, {130, 130}).value();
  const Fp8Blocks r = quantize(w);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(r.scale.as<float>()[i], 1e-4F / 448.0F);
  for (std::int64_t i = 0; i < r.q.bytes(); ++i) ASSERT_EQ(r.q.as<std::uint8_t>()[i], 0);
}

TEST(Fp8Block, SmallTilesHaveNoFloor) {
  // The published one, as long as it leaves a code of 1.
  const float least = 1e-4F / 448.0F;
  Tensor one = Tensor::zeros(DType::kF32, {1, 1}).value();
  for (const float value : {1e-5F, least}) {
    one.as<float>()[0] = value;
    EXPECT_EQ(quantize(one).scale.as<float>()[0], least);
  }
  Tensor w = Tensor::zeros(DType::kF32, {1, 2}).value();
  w.as<float>()[0] = 448e-20F;
  w.as<float>()[1] = -7e-20F;
  const Fp8Blocks r = quantize(w);
  EXPECT_EQ(r.scale.as<float>()[0], 448e-20F / 448.0F);
  EXPECT_EQ(r.q.as<std::uint8_t>()[0], 0x7E);
  EXPECT_EQ(r.q.as<std::uint8_t>()[1], 0xCE);
}

// Every element against the definition, tile by tile, on ragged shapes.
TEST(Fp8Block, FollowsTheDefinitionOnRaggedShapes) {
  for (const quant::ScaleRounding rounding :
       {quant::ScaleRounding::kNone, quant::ScaleRounding::kCeilPowerOfTwo}) {
    test::Rng rng(31);
    const Tensor w = test::random_normal(rng, DType::kBF16, {2, 257, 130});
    const std::vector<double> x = test::to_doubles(w.view());
    const Fp8Blocks r = quantize(w, {}, rounding);
    const Tensor dq = dequantize(r);
    for (std::int64_t e = 0; e < 2; ++e) {
      for (std::int64_t i = 0; i < 3; ++i) {
        for (std::int64_t j = 0; j < 2; ++j) {
          float amax = 1e-4F;
          const auto at = [&](std::int64_t n, std::int64_t k) { return (e * 257 + n) * 130 + k; };
          for (std::int64_t n = i * 128; n < std::min<std::int64_t>(257, i * 128 + 128); ++n) {
            for (std::int64_t k = j * 128; k < std::min<std::int64_t>(130, j * 128 + 128); ++k) {
              amax = std::max(amax,
                              static_cast<float>(std::abs(x[static_cast<std::size_t>(at(n, k))])));
            }
          }
          float s = amax / 448.0F;
          if (rounding == quant::ScaleRounding::kCeilPowerOfTwo) {
            s = static_cast<float>(std::exp2(std::ceil(std::log2(static_cast<double>(s)))));
          }
          ASSERT_EQ(r.scale.as<float>()[(e * 3 + i) * 2 + j], s);
          for (std::int64_t n = i * 128; n < std::min<std::int64_t>(257, i * 128 + 128); ++n) {
            for (std::int64_t k = j * 128; k < std::min<std::int64_t>(130, j * 128 + 128); ++k) {
              const auto value = static_cast<float>(x[static_cast<std::size_t>(at(n, k))]);
              const std::uint8_t code = r.q.as<std::uint8_t>()[at(n, k)];
              ASSERT_EQ(code, e4m3_from_f32(value * (1.0F / s)));
              ASSERT_EQ(dq.as<float>()[at(n, k)], f32_from_e4m3(code) * s);
            }
          }
        }
      }
    }
  }
}

TEST(Fp8Block, ErrorOnNormalDataIsTheFormats) {
  test::Rng rng(7);
  const Tensor w = test::random_normal(rng, DType::kF32, {256, 1024});
  const auto want = test::to_doubles(w.view());
  const double plain = test::compare(test::to_doubles(dequantize(quantize(w)).view()), want).rel_l2;
  EXPECT_GT(plain, 0.0250);
  EXPECT_LT(plain, 0.0271);
  const double up =
      test::compare(test::to_doubles(
                        dequantize(quantize(w, {}, quant::ScaleRounding::kCeilPowerOfTwo)).view()),
                    want)
          .rel_l2;
  EXPECT_GT(up, 0.0260);
  EXPECT_LT(up, 0.0272);
}

TEST(Fp8Block, RequantisingGivesTheSameCodes) {
  test::Rng rng(8);
  const Tensor w = test::random_normal(rng, DType::kF32, {256, 256});
  const Fp8Blocks once = quantize(w);
  const Fp8Blocks twice = quantize(dequantize(once));
  std::string why;
  EXPECT_TRUE(test::same_bits(once.q.view(), twice.q.view(), &why)) << why;
  // With a power of two the scale may halve when the largest element was rounded down to 224: the
  // values stay.
  const auto ceil = quant::ScaleRounding::kCeilPowerOfTwo;
  const Tensor values = dequantize(quantize(w, {}, ceil));
  EXPECT_TRUE(test::same_bits(dequantize(quantize(values, {}, ceil)).view(), values.view(), &why))
      << why;
}

TEST(Fp8Block, ShardsAlongTilesConcatenateToTheWhole) {
  test::Rng rng(9);
  const Tensor w = test::random_normal(rng, DType::kF32, {384, 200});
  const Fp8Blocks whole = quantize(w);
  Tensor top = Tensor::zeros(DType::kF32, {256, 200}).value();
  std::memcpy(top.data(), w.data(), static_cast<std::size_t>(top.bytes()));
  const Fp8Blocks part = quantize(top);
  EXPECT_EQ(std::memcmp(part.q.data(), whole.q.data(), static_cast<std::size_t>(part.q.bytes())),
            0);
  EXPECT_EQ(std::memcmp(part.scale.data(), whole.scale.data(),
                        static_cast<std::size_t>(part.scale.bytes())),
            0);
}

TEST(Fp8Block, DequantisesToNarrowTypesWithOneRounding) {
  test::Rng rng(10);
  const Fp8Blocks r = quantize(test::random_normal(rng, DType::kF32, {128, 130}));
  const Tensor f32 = dequantize(r);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Tensor out = Tensor::zeros(dtype, {128, 130}).value();
    ASSERT_TRUE(quant::dequantize_fp8_block(r.q.view(), r.scale.view(), {}, out.view()).ok());
    for (std::int64_t i = 0; i < 128 * 130; ++i) {
      const float x = f32.as<float>()[i];
      ASSERT_EQ(out.as<std::uint16_t>()[i],
                dtype == DType::kBF16 ? bf16_from_f32(x) : f16_from_f32(x));
    }
  }
}

TEST(Fp8Block, Misuse) {
  Tensor w = Tensor::zeros(DType::kF32, {130, 256}).value();
  Tensor q = Tensor::zeros(DType::kF8E4M3, {130, 256}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {2, 2}).value();
  const auto run = [&] {
    return quant::quantize_fp8_block(w.view(), {}, quant::ScaleRounding::kNone, q.view(),
                                     scale.view());
  };
  EXPECT_TRUE(run().ok());
  w.as<float>()[3 * 256 + 5] = std::numeric_limits<float>::quiet_NaN();
  expect_refusal(run(), StatusCode::kInvalidArgument, {"w", "row 3, column 5", "NaN", "finite"});
  w.as<float>()[3 * 256 + 5] = -std::numeric_limits<float>::infinity();
  expect_refusal(run(), StatusCode::kInvalidArgument, {"w", "row 3, column 5", "infinity"});
  w.as<float>()[3 * 256 + 5] = 0;
  Tensor small = Tensor::zeros(DType::kF32, {1, 2}).value();
  expect_refusal(
      quant::quantize_fp8_block(w.view(), {}, quant::ScaleRounding::kNone, q.view(), small.view()),
      StatusCode::kInvalidShape, {"scale", "[1, 2]", "[2, 2]", "block 128x128", "[130, 256]"});
  expect_refusal(
      quant::quantize_fp8_block(q.view(), {}, quant::ScaleRounding::kNone, q.view(), scale.view()),
      StatusCode::kInvalidDType, {"w", "F8_E4M3"});
  expect_refusal(
      quant::quantize_fp8_block(w.view(), {}, quant::ScaleRounding::kNone, w.view(), scale.view()),
      StatusCode::kInvalidDType, {"q", "F32", "F8_E4M3"});
  Tensor wrong = Tensor::zeros(DType::kF8E4M3, {256, 130}).value();
  expect_refusal(quant::quantize_fp8_block(w.view(), {}, quant::ScaleRounding::kNone, wrong.view(),
                                           scale.view()),
                 StatusCode::kInvalidShape, {"q", "[256, 130]"});
  TensorView inside(w.data(), DType::kF8E4M3, {130, 256});
  expect_refusal(
      quant::quantize_fp8_block(w.view(), {}, quant::ScaleRounding::kNone, inside, scale.view()),
      StatusCode::kAliasing, {"w", "q"});
  ConstTensorView transposed(w.data(), DType::kF32, {130, 256});
  transposed.strides = {1, 130};
  expect_refusal(quant::quantize_fp8_block(transposed, {}, quant::ScaleRounding::kNone, q.view(),
                                           scale.view()),
                 StatusCode::kInvalidLayout, {"w", "contiguous"});
  test::poison(scale.view());
  expect_refusal(quant::dequantize_fp8_block(q.view(), scale.view(), {}, w.view()),
                 StatusCode::kInvalidArgument, {"scale[0, 0]", "NaN"});
}

}  // namespace
}  // namespace moesaic
