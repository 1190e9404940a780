// Router::select_experts allocates nothing: every operator new of this binary is counted.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "router/router_fixture.h"
#include "support/count_allocations.h"

namespace moesaic {
namespace {

// Of the second call on these options, with random logits.
long allocations_of_a_call(Router::Options options, DType ids_dtype, std::int64_t tokens,
                           DType logits_dtype = DType::kF32) {
  test::Rng rng(61);
  const std::int64_t columns = options.spec.num_experts + options.spec.num_zero_experts;
  const Tensor bias = test::random_normal(rng, DType::kF32, {columns});
  if (options.spec.has_correction_bias) options.correction_bias = bias.view();
  auto created = Router::create(options);
  EXPECT_TRUE(created.ok()) << created.status().message();
  if (!created.ok()) return -1;
  const Router router = std::move(created).value();
  const Tensor logits = test::random_normal(rng, logits_dtype, {tokens, columns});
  const Tensor x = test::random_normal(rng, DType::kF32, {tokens, 8});
  const Tensor table_ids =
      test::vector_i32(std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 1));
  Tensor zero = Tensor::zeros(DType::kF32, {tokens, 8}).value();
  Tensor weights = Tensor::zeros(DType::kF32, {tokens, router.slots()}).value();
  Tensor ids = Tensor::zeros(ids_dtype, {tokens, router.slots()}).value();
  Router::Args args;
  args.router_logits = logits.view();
  args.topk_weights = weights.view();
  args.topk_ids = ids.view();
  if (options.spec.method == RoutingMethod::kHash) args.input_ids = table_ids.view();
  if (options.spec.num_zero_experts > 0) {
    args.hidden_states = x.view();
    args.zero_expert_output = zero.view();
  }
  const Status first = router.select_experts(args);
  EXPECT_TRUE(first.ok()) << first.message();
  const long before = test::allocations();
  const Status second = router.select_experts(args);
  const long after = test::allocations();
  EXPECT_TRUE(second.ok());
  return after - before;
}

TEST(RouterAllocation, SelectExpertsAllocatesNothing) {
  const Tensor table = test::vector_i32(std::vector<std::int32_t>(10 * 2, 1));
  for (const DType ids : {DType::kI32, DType::kI64}) {
    for (const std::int64_t tokens : {1, 300}) {
      for (const RoutingMethod method :
           {RoutingMethod::kTopK, RoutingMethod::kTopKSoftmax, RoutingMethod::kLlama4,
            RoutingMethod::kSparseMixer, RoutingMethod::kPNorm, RoutingMethod::kZeroExpert,
            RoutingMethod::kHash}) {
        Router::Options options;
        options.num_threads = 2;
        options.spec = test::method_spec(method, 64, 2);
        if (method == RoutingMethod::kHash) {
          options.spec.scoring_func = ScoringFunc::kSqrtSoftplus;
          options.hash_table = {table.view().data, DType::kI32, {10, 2}};
        }
        if (method == RoutingMethod::kZeroExpert) {
          options.spec.num_zero_experts = 2;
          options.spec.has_correction_bias = true;
        }
        SCOPED_TRACE(routing_method_name(method));
        EXPECT_EQ(allocations_of_a_call(options, ids, tokens), 0);
        EXPECT_EQ(allocations_of_a_call(options, ids, tokens, DType::kBF16), 0);
      }
      // As many experts as the stack is enough for, in as many groups as there can be.
      Router::Options many;
      many.num_threads = 2;
      many.num_fused_shared_experts = 1;
      many.spec = test::grouped_spec(ScoringFunc::kSigmoid, 1024, 512, true, 512, 512);
      many.spec.has_correction_bias = true;
      EXPECT_EQ(allocations_of_a_call(many, ids, tokens, DType::kBF16), 0);
      many.spec = test::topk_spec(ScoringFunc::kSoftmax, 1024, 1024, true);
      EXPECT_EQ(allocations_of_a_call(many, ids, tokens, DType::kBF16), 0);
    }
  }
  // More are routed as well, in memory of the call's own.
  Router::Options more;
  more.spec = test::topk_spec(ScoringFunc::kSoftmax, 3000, 8, true);
  EXPECT_EQ(allocations_of_a_call(more, DType::kI32, 3), 1);
}

}  // namespace
}  // namespace moesaic
