#include <cstring>

#include "interop/cases.h"
#include "moesaic/interop/permute.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::Ids;

TEST(MoePermute, WorkedExampleOfOneRank) {
  const test::RoutingCase c{test::worked_ids(), test::worked_map(), 2, 4, 2};
  Tensor a = Tensor::zeros(DType::kF32, {4, 1}).value();
  for (int i = 0; i < 4; ++i) a.as<float>()[i] = static_cast<float>(i);
  std::vector<std::int64_t> first(3, -77);
  Ids sorted(8, -77);
  Ids inverse(8, -77);
  Tensor out = Tensor::zeros(DType::kF32, {8, 1}).value();
  test::poison(out.view());
  ASSERT_TRUE(moe_permute(c.routing(), a.view(), first, sorted, inverse, out.view()).ok());
  EXPECT_EQ(first, (std::vector<std::int64_t>{0, 3, 5}));
  EXPECT_EQ(sorted, (Ids{0, 3, 4, 1, 6, 2, 5, 7}));
  EXPECT_EQ(inverse, (Ids{0, 3, 5, 1, 2, 6, 4, 7}));
  const float want[] = {0, 1, 2, 0, 3};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(out.as<float>()[i], want[i]);
  for (int i = 5; i < 8; ++i) EXPECT_EQ(out.as<std::uint32_t>()[i], 0xFFFFFFFFU) << "written";
}

TEST(MoePermute, InverseAndRowsOnRandomRoutings) {
  test::Rng rng(400);
  for (int i = 0; i < 300; ++i) {
    const test::RoutingCase c = test::random_case(rng);
    const auto slots = static_cast<std::int64_t>(c.ids.size());
    const Tensor a = test::random_normal(rng, DType::kBF16, {slots / c.top_k, 3});
    std::vector<std::int64_t> first(static_cast<std::size_t>(c.num_local) + 1, -77);
    Ids sorted(c.ids.size(), -77);
    Ids inverse(c.ids.size(), -77);
    Tensor out = Tensor::zeros(DType::kBF16, {slots, 3}).value();
    test::poison(out.view());
    ASSERT_TRUE(moe_permute(c.routing(), a.view(), first, sorted, inverse, out.view()).ok());
    for (std::size_t s = 0; s < c.ids.size(); ++s) {
      const std::int32_t row = inverse[s];
      ASSERT_EQ(sorted[static_cast<std::size_t>(row)], static_cast<std::int32_t>(s));
      const std::int32_t e = c.local(s);
      if (e < 0) {
        ASSERT_GE(row, first.back());
        ASSERT_EQ(out.as<std::uint16_t>()[row * 3], 0xFFFF);
        continue;
      }
      ASSERT_GE(row, first[static_cast<std::size_t>(e)]);
      ASSERT_LT(row, first[static_cast<std::size_t>(e) + 1]);
      const std::int64_t token = static_cast<std::int64_t>(s) / c.top_k;
      ASSERT_EQ(
          std::memcmp(out.as<std::uint16_t>() + row * 3, a.as<std::uint16_t>() + token * 3, 6), 0);
    }
  }
}

TEST(MoePermute, Misuse) {
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  Tensor a = Tensor::zeros(DType::kF32, {4, 2}).value();
  Tensor out = Tensor::zeros(DType::kF32, {8, 2}).value();
  Tensor small = Tensor::zeros(DType::kF32, {7, 2}).value();
  std::vector<std::int64_t> first(5);
  Ids sorted(8);
  Ids inverse(8);
  ASSERT_TRUE(moe_permute(c.routing(), a.view(), first, sorted, inverse, out.view()).ok());
  expect_refusal(moe_permute(c.routing(), a.view(), first, sorted, inverse, small.view()),
                 StatusCode::kInvalidShape, {"permuted", "[7, 2]", "[8, 2]"});
  Ids seven(7);
  expect_refusal(moe_permute(c.routing(), a.view(), first, sorted, seven, out.view()),
                 StatusCode::kInvalidShape, {"inv_permuted_idx", "got 7", "need 8"});
  expect_refusal(moe_permute(c.routing(), a.view(), first, seven, inverse, out.view()),
                 StatusCode::kInvalidShape, {"sorted_slots", "got 7", "need 8"});
  // Mistakes that the steps behind find as well have the names of this function's arguments.
  std::vector<std::int64_t> four(4);
  expect_refusal(moe_permute(c.routing(), a.view(), four, sorted, inverse, out.view()),
                 StatusCode::kInvalidShape, {"expert_first_token_offset", "got 4", "need 5"});
  const auto into = [&](const TensorView& to) {
    return moe_permute(c.routing(), a.view(), first, sorted, inverse, to);
  };
  expect_refusal(into({out.data(), DType::kBF16, {8, 2}}), StatusCode::kInvalidDType,
                 {"permuted: got BF16"});
  expect_refusal(into({out.data(), DType::kF32, {8, 1}}), StatusCode::kInvalidShape,
                 {"permuted: got [8, 1]", "[8, 2]"});
  expect_refusal(into({nullptr, DType::kF32, {8, 2}}), StatusCode::kInvalidArgument,
                 {"permuted: got a null pointer"});
  expect_refusal(into({out.data(), DType::kF32, {8, 2}, Device::cuda(0)}),
                 StatusCode::kInvalidArgument, {"permuted: got memory of cuda:0"});
  test::RoutingCase bad = c;
  bad.ids[2] = -3;
  expect_refusal(moe_permute(bad.routing(), a.view(), first, sorted, inverse, out.view()),
                 StatusCode::kInvalidArgument, {"token 1, slot 0", "-3"});
}

}  // namespace
}  // namespace moesaic
