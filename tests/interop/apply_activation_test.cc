#include <gtest/gtest.h>

#include <vector>

#include "activation/reference/activation.h"
#include "moesaic/interop/own_layer.h"
#include "numerics/element.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

const ActivationSpec kSilu{};

using test::expect_refusal;

Tensor tensor(DType dtype, const Shape& shape) { return Tensor::zeros(dtype, shape).value(); }

TEST(ApplyActivation, EveryDTypeRoundsTheFp32ResultOnce) {
  for (const DType in_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType out_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      test::Rng rng(3);
      const Tensor in = test::random_normal(rng, in_dtype, {5, 14});
      Tensor out = tensor(out_dtype, {5, 7});
      test::poison(out.view());
      ASSERT_TRUE(apply_activation(kSilu, GateUpLayout::kGateThenUp, in.view(), out.view()).ok());
      Tensor want = tensor(out_dtype, {5, 7});
      for (std::int64_t r = 0; r < 5; ++r) {
        for (std::int64_t i = 0; i < 7; ++i) {
          const float y =
              activation::ref_activate(kSilu, load_as_f32(in.data(), in_dtype, r * 14 + i),
                                       load_as_f32(in.data(), in_dtype, r * 14 + 7 + i));
          store_from_f32(want.data(), out_dtype, r * 7 + i, y);
        }
      }
      std::string why;
      EXPECT_TRUE(test::same_bits(out.view(), want.view(), &why)) << why;
    }
  }
}

TEST(ApplyActivation, InterleavedAndNonGated) {
  test::Rng rng(4);
  const Tensor in = test::random_normal(rng, DType::kF32, {3, 10});
  const ActivationSpec oai = make_activation("swigluoai").value();
  Tensor out = tensor(DType::kF32, {3, 5});
  ASSERT_TRUE(apply_activation(oai, GateUpLayout::kInterleaved, in.view(), out.view()).ok());
  for (std::int64_t i = 0; i < 15; ++i) {
    EXPECT_EQ(out.as<float>()[i],
              activation::ref_activate(oai, in.as<float>()[2 * i], in.as<float>()[2 * i + 1]));
  }
  const ActivationSpec relu2 = make_activation("relu2").value();
  Tensor same = tensor(DType::kF32, {3, 10});
  ASSERT_TRUE(apply_activation(relu2, GateUpLayout::kNonGated, in.view(), same.view()).ok());
  for (std::int64_t i = 0; i < 30; ++i) {
    const float x = std::max(in.as<float>()[i], 0.0F);
    EXPECT_EQ(same.as<float>()[i], x * x);
  }
}

TEST(ApplyActivation, CountsLimitWhatIsReadAndWritten) {
  test::Rng rng(6);
  Tensor in = test::random_normal(rng, DType::kF32, {3, 4, 6});
  const std::vector<std::int32_t> counts = {2, 0, 4};
  Tensor all = tensor(DType::kF32, {3, 4, 3});
  ASSERT_TRUE(apply_activation(kSilu, GateUpLayout::kGateThenUp, in.view(), all.view()).ok());
  Tensor out = tensor(DType::kF32, {3, 4, 3});
  test::poison(out.view());
  // Rows past the counts hold NaN: they must not be touched.
  for (std::int64_t e = 0; e < 3; ++e) {
    const std::int64_t c = counts[static_cast<std::size_t>(e)];
    test::poison(in.as<float>() + (e * 4 + c) * 6, (4 - c) * 6 * 4);
  }
  ASSERT_TRUE(
      apply_activation(kSilu, GateUpLayout::kGateThenUp, in.view(), out.view(), counts).ok());
  for (std::int64_t e = 0; e < 3; ++e) {
    for (std::int64_t r = 0; r < 4; ++r) {
      for (std::int64_t i = 0; i < 3; ++i) {
        const std::int64_t at = (e * 4 + r) * 3 + i;
        if (r < counts[static_cast<std::size_t>(e)]) {
          EXPECT_EQ(out.as<float>()[at], all.as<float>()[at]);
        } else {
          EXPECT_EQ(out.as<std::uint32_t>()[at], 0xFFFFFFFFU) << "written past the count";
        }
      }
    }
  }
  // One count for a flat buffer.
  const std::vector<std::int32_t> one = {1};
  Tensor flat = test::random_normal(rng, DType::kF32, {2, 6});
  Tensor flat_out = tensor(DType::kF32, {2, 3});
  test::poison(flat_out.view());
  ASSERT_TRUE(
      apply_activation(kSilu, GateUpLayout::kGateThenUp, flat.view(), flat_out.view(), one).ok());
  EXPECT_NE(flat_out.as<std::uint32_t>()[0], 0xFFFFFFFFU);
  EXPECT_EQ(flat_out.as<std::uint32_t>()[3], 0xFFFFFFFFU);
}

TEST(ApplyActivation, NoRowsAreOrdinary) {
  Tensor in = tensor(DType::kF32, {0, 6});
  Tensor out = tensor(DType::kF32, {0, 3});
  EXPECT_TRUE(apply_activation(kSilu, GateUpLayout::kGateThenUp, in.view(), out.view()).ok());
}

TEST(ApplyActivation, Misuse) {
  const auto packed = GateUpLayout::kGateThenUp;
  Tensor in = tensor(DType::kF32, {4, 16});
  Tensor out = tensor(DType::kF32, {4, 8});
  Tensor narrow = tensor(DType::kF32, {4, 7});
  expect_refusal(apply_activation(kSilu, packed, in.view(), narrow.view()),
                 StatusCode::kInvalidShape, {"out", "[4, 7]", "[4, 8]"});
  expect_refusal(apply_activation(kSilu, packed, narrow.view(), out.view()),
                 StatusCode::kInvalidShape, {"in", "width 7", "even"});
  Tensor line = tensor(DType::kF32, {16});
  expect_refusal(apply_activation(kSilu, packed, line.view(), out.view()),
                 StatusCode::kInvalidShape, {"in", "[16]", "rank"});
  Tensor ints = tensor(DType::kI32, {4, 16});
  expect_refusal(apply_activation(kSilu, packed, ints.view(), out.view()),
                 StatusCode::kInvalidDType, {"in", "I32", "BF16"});
  Tensor f64 = tensor(DType::kF64, {4, 8});
  expect_refusal(apply_activation(kSilu, packed, in.view(), f64.view()), StatusCode::kInvalidDType,
                 {"out", "F64"});
  TensorView alias(in.data(), DType::kF32, {4, 8});
  expect_refusal(apply_activation(kSilu, packed, in.view(), alias), StatusCode::kAliasing,
                 {"in", "out"});
  const Device gpu = Device::cuda(0);
  expect_refusal(
      apply_activation(kSilu, packed, {in.data(), DType::kF32, {4, 16}, gpu}, out.view()),
      StatusCode::kInvalidArgument, {"in: got memory of cuda:0"});
  expect_refusal(apply_activation(kSilu, packed, in.view(), {out.data(), DType::kF32, {4, 8}, gpu}),
                 StatusCode::kInvalidArgument, {"out: got memory of cuda:0"});
  ConstTensorView strided(in.data(), DType::kF32, {2, 16});
  strided.strides[0] = 32;
  TensorView out2(out.data(), DType::kF32, {2, 8});
  expect_refusal(apply_activation(kSilu, packed, strided, out2), StatusCode::kInvalidLayout,
                 {"in", "contiguous"});
  expect_refusal(apply_activation(kSilu, GateUpLayout::kNonGated, in.view(), out.view()),
                 StatusCode::kInvalidArgument, {"layout", "kNonGated", "silu"});
  expect_refusal(apply_activation(make_activation("relu2").value(), packed, in.view(), out.view()),
                 StatusCode::kInvalidArgument, {"layout", "relu2_no_mul", "need kNonGated"});
  expect_refusal(apply_activation(kSilu, static_cast<GateUpLayout>(4), in.view(), out.view()),
                 StatusCode::kInvalidArgument, {"layout: got 4", "GateUpLayout"});
  expect_refusal(
      apply_activation(kSilu, packed, {in.data(), static_cast<DType>(99), {4, 16}}, out.view()),
      StatusCode::kInvalidDType, {"in: got unknown"});
  // As many slabs without rows, or rows without columns, as one likes: nothing to walk over.
  constexpr std::int64_t kMany = std::int64_t{1} << 55;
  EXPECT_TRUE(apply_activation(kSilu, packed, {in.data(), DType::kF32, {kMany, 0, 16}},
                               {out.data(), DType::kF32, {kMany, 0, 8}})
                  .ok());
  EXPECT_TRUE(apply_activation(kSilu, packed, {in.data(), DType::kF32, {kMany, 0}},
                               {out.data(), DType::kF32, {kMany, 0}})
                  .ok());
  ActivationSpec bad;
  bad.limit = -1;
  expect_refusal(apply_activation(bad, packed, in.view(), out.view()), StatusCode::kInvalidArgument,
                 {"limit", "-1"});
  const std::vector<std::int32_t> two = {1, 1};
  expect_refusal(apply_activation(kSilu, packed, in.view(), out.view(), two),
                 StatusCode::kInvalidShape, {"expert_num_tokens", "got 2", "need 1"});
  for (const std::int32_t count : {-1, 5}) {
    const std::vector<std::int32_t> c = {count};
    expect_refusal(apply_activation(kSilu, packed, in.view(), out.view(), c),
                   StatusCode::kInvalidArgument, {"expert_num_tokens[0]", "need 0 .. 4"});
  }
}

}  // namespace
}  // namespace moesaic
