#include "prepare_finalize/topk_weight_and_reduce.h"

#include <gtest/gtest.h>

#include <vector>

#include "support/metrics.h"
#include "support/moe_oracle.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::Rng;
using test::same_bits;

prepare_finalize::SlotWeights slots_of(const test::OwnedRouting& routing,
                                       std::span<const std::int32_t> map = {},
                                       bool on_input = false) {
  return {routing.weights.as<float>(), routing.ids.as<std::int32_t>(), map, routing.ids.shape()[1],
          on_input};
}

TEST(ReduceNoOp, TheSameStorageIsLeftAlone) {
  Tensor out = Tensor::uninitialized(DType::kF32, {3, 5}).value();
  test::poison(out.view());
  const std::vector<std::byte> before(out.data(), out.data() + out.bytes());
  ASSERT_TRUE(prepare_finalize::reduce_no_op(out.view(), out.view()).ok());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), out.data()));
}

TEST(ReduceNoOp, CopiesOtherStorageAndConverts) {
  Rng rng(1);
  const Tensor from = test::random_integers(rng, DType::kF32, {3, 5}, 100);
  Tensor same = Tensor::zeros(DType::kF32, {3, 5}).value();
  Tensor narrow = Tensor::zeros(DType::kBF16, {3, 5}).value();
  ASSERT_TRUE(prepare_finalize::reduce_no_op(same.view(), from.view()).ok());
  ASSERT_TRUE(prepare_finalize::reduce_no_op(narrow.view(), from.view()).ok());
  EXPECT_EQ(test::to_doubles(same.view()), test::to_doubles(from.view()));
  EXPECT_EQ(test::to_doubles(narrow.view()), test::to_doubles(from.view()));
}

TEST(ReduceNoOp, SizesMustMatch) {
  const Tensor from = Tensor::zeros(DType::kF32, {2, 5}).value();
  Tensor to = Tensor::zeros(DType::kF32, {3, 5}).value();
  const Status status = prepare_finalize::reduce_no_op(to.view(), from.view());
  EXPECT_EQ(status.code(), StatusCode::kInvalidShape);
  EXPECT_NE(status.message().find("expert_output: got [2, 5], need [3, 5]"), std::string::npos);
}

// Integers and quarter weights: sums are exact, so the expected values are the only right ones.
struct Exact {
  test::OwnedRouting routing = test::random_routing(2, 4, 6, 3, 0.2);
  Tensor rows;
  explicit Exact(std::uint64_t seed) {
    Rng rng(seed);
    rows = test::random_integers(rng, DType::kF32, {12, 300}, 8);
    for (int i = 0; i < 12; ++i) {
      routing.weights.as<float>()[i] = static_cast<float>(rng.integer(1, 8)) * 0.25F;
    }
  }
  // Sum over the slots that `uses` accepts.
  template <class Uses>
  std::vector<double> want(bool weighted, Uses uses) const {
    std::vector<double> sum(4 * 300);
    for (std::int64_t s = 0; s < 12; ++s) {
      if (!uses(routing.ids.as<std::int32_t>()[s])) continue;
      const double w = weighted ? static_cast<double>(routing.weights.as<float>()[s]) : 1.0;
      for (std::int64_t h = 0; h < 300; ++h) {
        sum[static_cast<std::size_t>(s / 3 * 300 + h)] +=
            w * static_cast<double>(rows.as<float>()[s * 300 + h]);
      }
    }
    return sum;
  }
};

TEST(ReduceContiguous, WeightsAndSumsOverSlotsInBothShapes) {
  const Exact e(3);
  const auto want = e.want(true, [](std::int32_t id) { return id >= 0; });
  for (const Shape& shape : {Shape{12, 300}, Shape{4, 3, 300}}) {
    Tensor out = Tensor::uninitialized(DType::kF32, {4, 300}).value();
    test::poison(out.view());
    const ConstTensorView view(e.rows.data(), DType::kF32, shape);
    ASSERT_TRUE(prepare_finalize::reduce_contiguous(out.view(), view, slots_of(e.routing)).ok());
    EXPECT_EQ(test::to_doubles(out.view()), want);
  }
}

TEST(ReduceContiguous, SkipsTheMultiplicationWhenTheWeightWasOnTheInput) {
  const Exact e(4);
  Tensor out = Tensor::zeros(DType::kF32, {4, 300}).value();
  ASSERT_TRUE(prepare_finalize::reduce_contiguous(out.view(), e.rows.view(),
                                                  slots_of(e.routing, {}, /*on_input=*/true))
                  .ok());
  EXPECT_EQ(test::to_doubles(out.view()), e.want(false, [](std::int32_t id) { return id >= 0; }));
}

TEST(ReduceContiguous, NeverReadsRowsOfRemoteExpertsAndWritesZeros) {
  Exact e(5);
  const std::vector<std::int32_t> map = {-1, 0, -1, 1, -1, 2};
  const auto local = [&](std::int32_t id) {
    return id >= 0 && map[static_cast<std::size_t>(id)] >= 0;
  };
  for (int j = 0; j < 3; ++j)
    e.routing.ids.as<std::int32_t>()[3 + j] = 2 * j;  // token 1: all remote
  const auto want = e.want(true, local);
  for (std::int64_t s = 0; s < 12; ++s) {
    if (!local(e.routing.ids.as<std::int32_t>()[s])) {
      test::poison(e.rows.as<float>() + s * 300, 300 * 4);
    }
  }
  Tensor out = Tensor::uninitialized(DType::kF32, {4, 300}).value();
  test::poison(out.view());
  ASSERT_TRUE(
      prepare_finalize::reduce_contiguous(out.view(), e.rows.view(), slots_of(e.routing, map))
          .ok());
  EXPECT_EQ(test::to_doubles(out.view()), want);
  for (std::int64_t h = 0; h < 300; ++h) EXPECT_EQ(out.as<float>()[300 + h], 0.0F);
}

// One rounding at the end: sums in bf16 would lose the small terms.
TEST(ReduceContiguous, AccumulatesInFp32AndRoundsOnce) {
  Tensor rows = Tensor::zeros(DType::kBF16, {3, 1}).value();
  rows.as<std::uint16_t>()[0] = 0x4380;  // 256
  rows.as<std::uint16_t>()[1] = 0x3F80;  // 1
  rows.as<std::uint16_t>()[2] = 0x3F80;
  test::OwnedRouting routing = test::random_routing(1, 1, 3, 3);
  for (int j = 0; j < 3; ++j) routing.weights.as<float>()[j] = 1.0F;
  Tensor out = Tensor::zeros(DType::kBF16, {1, 1}).value();
  ASSERT_TRUE(prepare_finalize::reduce_contiguous(out.view(), rows.view(), slots_of(routing)).ok());
  EXPECT_EQ(out.as<std::uint16_t>()[0], 0x4381);  // 258; bf16 sums would stay at 256
}

TEST(ReduceNaiveBatched, FindsTheRowsOfEverySlot) {
  const Exact e(6);
  // Slot s of token t at row t of its expert's slab; other rows hold NaN.
  Tensor slabs = Tensor::uninitialized(DType::kF32, {6, 5, 300}).value();
  test::poison(slabs.view());
  std::vector<std::int32_t> slot_rows(12, -1);
  for (std::int64_t s = 0; s < 12; ++s) {
    const std::int32_t id = e.routing.ids.as<std::int32_t>()[s];
    if (id < 0) continue;
    slot_rows[static_cast<std::size_t>(s)] = static_cast<std::int32_t>(s / 3);
    std::copy_n(e.rows.as<float>() + s * 300, 300, slabs.as<float>() + (id * 5 + s / 3) * 300);
  }
  Tensor out = Tensor::uninitialized(DType::kF32, {4, 300}).value();
  test::poison(out.view());
  ASSERT_TRUE(prepare_finalize::reduce_naive_batched(out.view(), slabs.view(), slots_of(e.routing),
                                                     slot_rows)
                  .ok());
  EXPECT_EQ(test::to_doubles(out.view()), e.want(true, [](std::int32_t id) { return id >= 0; }));
}

TEST(Reduce, RefusesOtherShapes) {
  const Exact e(7);
  Tensor out = Tensor::zeros(DType::kF32, {4, 300}).value();
  const ConstTensorView flat(e.rows.data(), DType::kF32, {6, 600});
  EXPECT_EQ(prepare_finalize::reduce_contiguous(out.view(), flat, slots_of(e.routing)).code(),
            StatusCode::kInvalidShape);
  const std::vector<std::int32_t> rows(12);
  EXPECT_EQ(
      prepare_finalize::reduce_naive_batched(out.view(), flat, slots_of(e.routing), rows).code(),
      StatusCode::kInvalidShape);
  const ConstTensorView slabs(e.rows.data(), DType::kF32, {6, 2, 300});
  EXPECT_EQ(
      prepare_finalize::reduce_naive_batched(out.view(), slabs, slots_of(e.routing), {}).code(),
      StatusCode::kInvalidShape);
}

}  // namespace
}  // namespace moesaic
