#include <gtest/gtest.h>

#include "moesaic/interop/own_layer.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

TEST(DeriveProblemSizes, NeverReadsTheLastAxisOfAWeight) {
  // 4-bit weights: two values per byte, so w13 is [E_l, N, H / 2].
  const ConstTensorView w13(nullptr, DType::kU8, {4, 128, 48});
  const ConstTensorView x(nullptr, DType::kBF16, {5, 96});
  const ConstTensorView ids(nullptr, DType::kI32, {5, 2});
  const ProblemSizes s = derive_problem_sizes(w13, x, ids).value();
  EXPECT_EQ(s.num_local_experts, 4);
  EXPECT_EQ(s.num_experts, 4);
  EXPECT_EQ(s.w13_rows, 128);
  EXPECT_EQ(s.hidden_size, 96);
  EXPECT_EQ(s.tokens, 5);
  EXPECT_EQ(s.top_k, 2);
  EXPECT_EQ(derive_problem_sizes(w13, x, ids, 16)->num_experts, 16);
  const ConstTensorView slabs(nullptr, DType::kBF16, {4, 7, 96});
  EXPECT_EQ(derive_problem_sizes(w13, slabs, ids)->tokens, 7);
}

TEST(DeriveProblemSizes, NamesTheAxesThatDisagree) {
  const ConstTensorView w13(nullptr, DType::kBF16, {4, 128, 96});
  const ConstTensorView x(nullptr, DType::kBF16, {5, 96});
  const ConstTensorView ids(nullptr, DType::kI32, {5, 2});
  const ConstTensorView few(nullptr, DType::kI32, {4, 2});
  const ConstTensorView slabs(nullptr, DType::kBF16, {3, 7, 96});
  expect_refusal(derive_problem_sizes(w13, x, few).status(), StatusCode::kInvalidShape,
                 {"topk_ids: got 4 rows, hidden_states has 5"});
  expect_refusal(derive_problem_sizes(w13, slabs, ids).status(), StatusCode::kInvalidShape,
                 {"3 slabs, w13 has 4"});
  expect_refusal(derive_problem_sizes(x, x, ids).status(), StatusCode::kInvalidShape, {"w13"});
  expect_refusal(derive_problem_sizes(w13, x, ids, 3).status(), StatusCode::kInvalidArgument,
                 {"num_experts: got 3"});
  const ConstTensorView fewer(nullptr, DType::kBF16, {-4, 128, 96});
  expect_refusal(derive_problem_sizes(fewer, x, ids).status(), StatusCode::kInvalidShape,
                 {"w13: got [-4, 128, 96]", "dimensions >= 0"});
}

}  // namespace
}  // namespace moesaic
