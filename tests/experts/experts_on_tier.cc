#include "experts_on_tier.h"

#include <gtest/gtest.h>

#include <utility>

#include "cpu/tiers.h"
#include "experts/cpu/experts.h"

namespace moesaic::test {

std::vector<std::string> tiers() {
  std::vector<std::string> names;
  for (const cpu::TierInfo& t : cpu::cpu_tiers()) {
    if (t.available) names.emplace_back(t.name);
  }
  return names;
}

MoeProblem make_problem(std::string_view quant, std::int64_t h, std::int64_t i,
                        std::int64_t experts, std::int64_t k) {
  MoeProblem p;
  p.num_experts = p.num_local_experts = experts;
  p.top_k = k;
  p.hidden_size = h;
  p.intermediate_size = i;
  p.quant = test::scheme_called(quant);
  p.activation_dtype = quant == "f16" ? DType::kF16 : quant == "f32" ? DType::kF32 : DType::kBF16;
  p.max_tokens = 64;
  p.num_threads = 2;
  return p;
}

Tensor run_standard(const Experts& experts, const MoeProblem& p, ConstTensorView x,
                    const OwnedRouting& routing, DType out_dtype,
                    std::span<const std::int32_t> expert_map, std::span<RowNumerics> numerics) {
  Tensor y = Tensor::uninitialized(out_dtype, {x.dim(0), p.hidden_size}).value();
  poison(y.view());
  Workspace ws(experts.workspace_size(x.dim(0)).value());
  const Status s = experts.run({.hidden_states = x,
                                .topk_ids = routing.ids.view(),
                                .topk_weights = routing.weights.view(),
                                .expert_map = expert_map,
                                .expert_num_tokens = {},
                                .workspace = ws.span(),
                                .output = y.view(),
                                .numerics = numerics});
  EXPECT_TRUE(s.ok()) << s.to_string();
  return y;
}

std::unique_ptr<Experts> make(const std::string& tier, const MoeProblem& p,
                              const OwnedExpertWeights& w) {
  const auto source = make_stacked_source(w.view());
  auto experts = experts::make_cpu_experts(tier, p, *source);
  EXPECT_TRUE(experts.ok()) << experts.status().to_string();
  return std::move(experts).value();
}

}  // namespace moesaic::test
