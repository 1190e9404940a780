#include "quant/dequantize_weight.h"

#include <gtest/gtest.h>

#include <cmath>

#include "numerics/codec.h"
#include "quant/fp8_block.h"
#include "quant/int_group.h"
#include "quant/int_packing.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::poisoned;

Tensor values_of(const OperandQuant& quant, const quant::StoredMatrix& m, std::int64_t part = 0) {
  Tensor out = poisoned(DType::kF32, m.weight.shape);
  const Status s =
      quant::dequantize_weight(quant, m, part > 0 ? part : m.weight.dim(0), out.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

OperandQuant group_of(DType dtype, std::int64_t columns) {
  OperandQuant quant;
  quant.dtype = dtype;
  quant.granularity = ScaleGranularity::kGroup;
  quant.block_k = columns;
  return quant;
}

TEST(DequantizeWeight, AgreesWithEveryFormatsOwn) {
  test::Rng rng(1);
  const Tensor x = test::random_normal(rng, DType::kF32, {96, 256});
  Tensor want = poisoned(DType::kF32, {96, 256});
  const auto expect_want = [&](const OperandQuant& quant, const quant::StoredMatrix& m,
                               std::int64_t part = 0) {
    std::string why;
    EXPECT_TRUE(test::same_bits(values_of(quant, m, part).view(), want.view(), &why)) << why;
  };
  {  // FP8 blocks, two parts of 48 rows: scales start anew at row 48.
    OperandQuant quant;
    quant.dtype = DType::kF8E4M3;
    quant.granularity = ScaleGranularity::kBlock;
    quant.block_n = 32;
    quant.block_k = 128;
    Tensor q = poisoned(DType::kF8E4M3, {96, 256});
    Tensor scale = poisoned(DType::kF32, {4, 2});
    for (const std::int64_t part : {0, 1}) {
      const std::int64_t at = part * 48 * 256;
      const ConstTensorView half(x.data() + at * 4, DType::kF32, {48, 256});
      const TensorView q_half(q.data() + at, DType::kF8E4M3, {48, 256});
      const TensorView scale_half(scale.data() + part * 16, DType::kF32, {2, 2});
      const TensorView want_half(want.data() + at * 4, DType::kF32, {48, 256});
      ASSERT_TRUE(quant::quantize_fp8_block(half, {32, 128}, quant::ScaleRounding::kNone, q_half,
                                            scale_half)
                      .ok());
      ASSERT_TRUE(quant::dequantize_fp8_block(q_half, scale_half, {32, 128}, want_half).ok());
    }
    expect_want(quant, {q.view(), scale.view(), {}, {}, {}, {}, {}}, 48);
  }
  {  // MXFP4
    OperandQuant quant = group_of(DType::kF4E2M1, 32);
    Tensor q = poisoned(DType::kF4E2M1, {96, 256});
    Tensor scale = poisoned(DType::kF8E8M0, {96, 8});
    ASSERT_TRUE(quant::quantize_mx(x.view(), ExponentRule::kCeil, q.view(), scale.view()).ok());
    ASSERT_TRUE(quant::dequantize_mx(q.view(), scale.view(), want.view()).ok());
    expect_want(quant, {q.view(), scale.view(), {}, {}, {}, {}, {}});
  }
  {  // NVFP4
    OperandQuant quant = group_of(DType::kF4E2M1, 16);
    quant.outer_scale = OuterScale::kTensor;
    Tensor q = poisoned(DType::kF4E2M1, {96, 256});
    Tensor scale = poisoned(DType::kF8E4M3, {96, 16});
    ASSERT_TRUE(quant::quantize_nvfp4(x.view(), 700.0F, q.view(), scale.view()).ok());
    ASSERT_TRUE(quant::dequantize_nvfp4(q.view(), scale.view(), 1.0F / 700.0F, want.view()).ok());
    const Tensor global = test::f32_of({1}, {1.0F / 700.0F});
    expect_want(quant, {q.view(), scale.view(), global.view(), {}, {}, {}, {}});
  }
  {  // uint4 with zero points, columns sorted by a permutation
    OperandQuant quant = group_of(DType::kU4, 64);
    quant.zero_point = ZeroPoint::kInteger;
    Tensor codes = poisoned(DType::kU8, {96, 256});
    Tensor scale = poisoned(DType::kF16, {96, 4});
    Tensor zeros = poisoned(DType::kU8, {96, 4});
    ASSERT_TRUE(
        quant::quantize_uint_group(x.view(), {4, 64, {}}, codes.view(), scale.view(), zeros.view())
            .ok());
    ASSERT_TRUE(
        quant::dequantize_int_group(codes.view(), scale.view(), zeros.view(), 64, want.view())
            .ok());
    Tensor nibbles = poisoned(DType::kU4, {96, 256});
    ASSERT_TRUE(quant::pack_nibbles(codes.view(), 0, nibbles.view()).ok());
    quant::StoredMatrix m = {nibbles.view(), scale.view(), {}, {}, zeros.view(), {}, {}};
    expect_want(quant, m);
    std::vector<std::int32_t> perm(256);
    for (std::size_t k = 0; k < 256; ++k) perm[k] = static_cast<std::int32_t>((k * 37 + 5) % 256);
    const Tensor order = test::tensor_of(DType::kI32, {256}, perm);
    quant.act_order = true;
    m.perm = order.view();
    const Tensor sorted = values_of(quant, m);
    for (std::int64_t n = 0; n < 96; ++n) {
      for (std::int64_t k = 0; k < 256; ++k) {
        ASSERT_EQ(sorted.as<float>()[n * 256 + perm[static_cast<std::size_t>(k)]],
                  want.as<float>()[n * 256 + k]);
      }
    }
  }
}

TEST(DequantizeWeight, TablesMinimaAndTwoLevelInt4) {
  OperandQuant quant = group_of(DType::kU4, 2);
  quant.table = CodeTable::kNf4;
  const Tensor codes = test::tensor_of<std::uint8_t>(DType::kU4, {1, 4}, {0x2A, 0xF9});
  const Tensor scale = test::f32_of({1, 2}, {2.0F, 3.0F});
  Tensor got = values_of(quant, {codes.view(), scale.view(), {}, {}, {}, {}, {}});
  for (int i = 0; i < 4; ++i) {
    const std::uint8_t code[] = {10, 2, 9, 15};
    EXPECT_EQ(got.as<float>()[i], kNf4Values[code[i]] * (i < 2 ? 2.0F : 3.0F));
  }
  quant.table = CodeTable::kIq4Nl;
  got = values_of(quant, {codes.view(), scale.view(), {}, {}, {}, {}, {}});
  const float iq4[] = {25 * 2.0F, -83 * 2.0F, 13 * 3.0F, 113 * 3.0F};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.as<float>()[i], iq4[i]);
  quant.table = CodeTable::kNone;
  quant.zero_point = ZeroPoint::kMin;
  const Tensor min = test::f32_of({1, 2}, {0.5F, -1.0F});
  got = values_of(quant, {codes.view(), scale.view(), {}, {}, {}, min.view(), {}});
  EXPECT_EQ(test::to_doubles(got.view()), (std::vector<double>{19.5, 3.5, 28, 46}));
  // e4m3(1.25 * 7) = 9 (8.75 is a tie, to even), times the channel's 2.
  OperandQuant w4a8 = group_of(DType::kI4, 128);
  w4a8.scale_format = ScaleFormat::kE4M3;
  w4a8.outer_scale = OuterScale::kChannel;
  const Tensor sevens = test::tensor_of<std::uint8_t>(DType::kI4, {1, 2}, {0x97});
  const Tensor byte = test::tensor_of<std::uint8_t>(DType::kF8E4M3, {1, 1}, {e4m3_from_f32(1.25F)});
  const Tensor channel = test::f32_of({1}, {2.0F});
  got = values_of(w4a8, {sevens.view(), byte.view(), {}, channel.view(), {}, {}, {}});
  const float product = f32_from_e4m3(e4m3_from_f32(8.75F));
  EXPECT_EQ(test::to_doubles(got.view()), (std::vector<double>{2.0 * product, -2.0 * product}));
}

TEST(DequantizeWeight, Misuse) {
  OperandQuant quant;
  quant.dtype = DType::kI8;
  quant.granularity = ScaleGranularity::kChannel;
  const Tensor q = test::tensor_of<std::int8_t>(DType::kI8, {2, 2}, {1, 2, 3, 4});
  const Tensor scale = test::f32_of({2}, {1, 1});
  Tensor out = poisoned(DType::kF32, {2, 2});
  const Tensor three = test::f32_of({3}, {1, 1, 1});
  expect_refusal(
      quant::dequantize_weight(quant, {q.view(), three.view(), {}, {}, {}, {}, {}}, 2, out.view()),
      StatusCode::kInvalidShape, {"scale", "[3]", "[2]"});
  quant.dtype = DType::kU8;
  expect_refusal(
      quant::dequantize_weight(quant, {q.view(), scale.view(), {}, {}, {}, {}, {}}, 2, out.view()),
      StatusCode::kInvalidDType, {"weight", "I8", "U8"});
  quant.dtype = DType::kI8;
  quant.act_order = true;
  const Tensor perm = test::tensor_of<std::int32_t>(DType::kI32, {2}, {0, 2});
  expect_refusal(quant::dequantize_weight(
                     quant, {q.view(), scale.view(), {}, {}, {}, {}, perm.view()}, 2, out.view()),
                 StatusCode::kInvalidArgument, {"perm[1]", "2", "0 .. 1"});
}

}  // namespace
}  // namespace moesaic
