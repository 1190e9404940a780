#include "router/router_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace moesaic::test {

std::vector<std::int32_t> Routed::row_ids(std::int64_t t) const {
  return {ids.begin() + t * slots, ids.begin() + (t + 1) * slots};
}
std::vector<float> Routed::row_weights(std::int64_t t) const {
  return {weights.begin() + t * slots, weights.begin() + (t + 1) * slots};
}

Tensor matrix(std::int64_t rows, const std::vector<float>& values) {
  Tensor t =
      Tensor::zeros(DType::kF32, {rows, static_cast<std::int64_t>(values.size()) / rows}).value();
  std::copy(values.begin(), values.end(), t.as<float>());
  return t;
}

Tensor vector_i32(const std::vector<std::int32_t>& values) {
  Tensor t = Tensor::zeros(DType::kI32, {static_cast<std::int64_t>(values.size())}).value();
  std::copy(values.begin(), values.end(), t.as<std::int32_t>());
  return t;
}

RoutingSpec method_spec(RoutingMethod method, std::int64_t experts, std::int64_t k) {
  RoutingSpec s;
  s.method = method;
  s.num_experts = experts;
  s.top_k = k;
  return s;
}

RoutingSpec topk_spec(ScoringFunc scoring, std::int64_t experts, std::int64_t k, bool renormalize) {
  RoutingSpec s = method_spec(RoutingMethod::kTopK, experts, k);
  s.scoring_func = scoring;
  s.renormalize = renormalize;
  return s;
}

RoutingSpec grouped_spec(ScoringFunc scoring, std::int64_t experts, std::int64_t k,
                         bool renormalize, std::int64_t groups, std::int64_t topk_group) {
  RoutingSpec s = topk_spec(scoring, experts, k, renormalize);
  s.method = RoutingMethod::kGroupedTopK;
  s.num_expert_group = groups;
  s.topk_group = topk_group;
  return s;
}

Routed run(const Router& router, Router::Args args) {
  const std::int64_t m = args.router_logits.dim(0);
  Tensor weights = Tensor::uninitialized(DType::kF32, {m, router.slots()}).value();
  Tensor ids = Tensor::uninitialized(DType::kI32, {m, router.slots()}).value();
  poison(weights.view());
  poison(ids.view());
  args.topk_weights = weights.view();
  args.topk_ids = ids.view();
  const Status s = router.select_experts(args);
  EXPECT_TRUE(s.ok()) << s.to_string();
  Routed out;
  out.slots = router.slots();
  out.weights.assign(weights.as<float>(), weights.as<float>() + m * out.slots);
  out.ids.assign(ids.as<std::int32_t>(), ids.as<std::int32_t>() + m * out.slots);
  return out;
}

Routed run(const Router& router, const Tensor& logits) {
  Router::Args args;
  args.router_logits = logits.view();
  return run(router, args);
}

std::vector<ScoringCase> scoring_cases() {
  std::vector<ScoringCase> all;
  for (const auto scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    for (const bool biased : {false, true}) {
      for (const bool renorm : {false, true}) {
        const std::string name(scoring_func_name(scoring));
        all.push_back({name + (biased ? " biased" : "") + (renorm ? " renorm" : ""), scoring,
                       biased, renorm});
      }
    }
  }
  return all;
}

Routed route(Router::Options options, const Tensor& logits, const std::vector<float>& bias) {
  Tensor bias_tensor;
  if (!bias.empty()) {
    const auto n = static_cast<std::int64_t>(bias.size());
    bias_tensor = Tensor::zeros(DType::kF32, {n}).value();
    std::copy(bias.begin(), bias.end(), bias_tensor.as<float>());
    options.correction_bias = bias_tensor.view();
    options.spec.has_correction_bias = true;
  }
  const auto router = Router::create(options);
  if (!router.ok()) {
    ADD_FAILURE() << router.status().to_string();
    return {};
  }
  return run(*router, logits);
}

void expect_digits(const std::vector<float>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  // Six decimals are printed, so the true value is within half a unit of the last one.
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 0.6e-6) << i;
}

}  // namespace moesaic::test
