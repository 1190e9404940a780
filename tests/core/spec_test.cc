// Every refusal of validate(MoeLayerSpec): its code and the field it names.
#include "moesaic/spec.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace moesaic {
namespace {

MoeLayerSpec good_spec() {
  MoeLayerSpec spec;
  spec.hidden_size = 64;
  spec.intermediate_size = 32;
  spec.num_experts = 8;
  spec.routing.num_experts = 8;
  spec.routing.top_k = 2;
  return spec;
}

MoeLayerSpec grouped_spec() {
  MoeLayerSpec spec = good_spec();
  spec.routing.method = RoutingMethod::kGroupedTopK;
  spec.routing.num_expert_group = 4;
  spec.routing.topk_group = 2;
  return spec;
}

TEST(SpecValidate, AcceptsOrdinaryLayers) {
  EXPECT_TRUE(validate(good_spec()).ok());
  EXPECT_TRUE(validate(grouped_spec()).ok());
  MoeLayerSpec one = good_spec();  // the smallest layer there is
  one.hidden_size = one.intermediate_size = one.num_experts = 1;
  one.routing.num_experts = one.routing.top_k = 1;
  one.apply_router_weight_on_input = true;
  EXPECT_TRUE(validate(one).ok()) << validate(one).to_string();
  MoeLayerSpec weighted = good_spec();  // Llama 4 with several experts per token
  weighted.apply_router_weight_on_input = true;
  EXPECT_TRUE(validate(weighted).ok());
  MoeLayerSpec all = good_spec();
  all.routing.top_k = 8;  // k == E
  EXPECT_TRUE(validate(all).ok());
  MoeLayerSpec zero = good_spec();  // k may reach into the identity experts
  zero.routing.method = RoutingMethod::kZeroExpert;
  zero.routing.num_zero_experts = 4;
  zero.routing.has_correction_bias = true;
  zero.routing.top_k = 12;
  EXPECT_TRUE(validate(zero).ok()) << validate(zero).to_string();
}

struct Refusal {
  std::string keyword;
  StatusCode code;
  std::function<void(MoeLayerSpec&)> spoil;
};

TEST(SpecValidate, RefusesByFieldAndCode) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto arg = StatusCode::kInvalidArgument;
  const std::vector<Refusal> cases = {
      {"layer", arg, [](auto& s) { s.layer = -2; }},
      {"hidden_size", arg, [](auto& s) { s.hidden_size = 0; }},
      {"intermediate_size", arg, [](auto& s) { s.intermediate_size = -1; }},
      {"num_experts", arg, [](auto& s) { s.num_experts = 0; }},
      {"routing.num_experts", arg, [](auto& s) { s.routing.num_experts = 7; }},
      {"routing.top_k", arg, [](auto& s) { s.routing.top_k = 0; }},
      {"routing.top_k", arg, [](auto& s) { s.routing.top_k = 9; }},
      {"num_zero_experts", arg, [](auto& s) { s.routing.num_zero_experts = -1; }},
      {"num_zero_experts", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.num_zero_experts = 2;
       }},
      {"num_zero_experts", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kZeroExpert;
       }},
      {"num_expert_group", arg, [](auto& s) { s.routing.num_expert_group = 3; }},
      {"num_expert_group", arg, [](auto& s) { s.routing.num_expert_group = 0; }},
      {"num_expert_group", arg, [](auto& s) { s.routing.num_expert_group = 16; }},
      {"group_by_best_two", arg,
       [](auto& s) {
         s.routing.num_expert_group = 8;
         s.routing.has_correction_bias = false;
         s.routing.group_by_best_two = true;
       }},
      {"topk_group", arg, [](auto& s) { s.routing.topk_group = 5; }},
      {"topk_group", arg, [](auto& s) { s.routing.topk_group = 0; }},
      {"top_k", arg, [](auto& s) { s.routing.top_k = 5; }},
      {"2 experts in a group", arg,
       [](auto& s) {
         s.routing.num_expert_group = 8;
         s.routing.has_correction_bias = true;
       }},
      {"num_expert_group", arg, [](auto& s) { s.routing.method = RoutingMethod::kTopK; }},
      {"sparse_mixer", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kSparseMixer;
         s.routing.top_k = 3;
       }},
      {"renormalize", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kSparseMixer;
         s.routing.renormalize = true;
       }},
      {"p_norm", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kPNorm;
         s.routing.p_norm = 0;
       }},
      {"routed_scaling_factor", arg, [](auto& s) { s.routing.routed_scaling_factor = 0; }},
      {"routed_scaling_factor", arg, [=](auto& s) { s.routing.routed_scaling_factor = nan; }},
      {"routed_scaling_factor", arg, [](auto& s) { s.routing.routed_scaling_factor = 1e300; }},
      {"routed_scaling_factor", arg, [](auto& s) { s.routing.routed_scaling_factor = 1e-50; }},
      {"scoring_func: got 9", arg,
       [](auto& s) { s.routing.scoring_func = static_cast<ScoringFunc>(9); }},
      {"has_correction_bias", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kTopKSoftmax;
         s.routing.has_correction_bias = true;
       }},
      {"renormalize", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kLlama4;
         s.routing.renormalize = true;
       }},
      {"jitter_eps", arg, [=](auto& s) { s.routing.jitter_eps = nan; }},
      {"renorm_floor", arg, [](auto& s) { s.routing.renorm_floor = 1e-12; }},
      {"renorm_floor", arg, [](auto& s) { s.routing.renorm_floor = -1; }},
      {"renorm_floor", arg, [](auto& s) { s.routing.renorm_floor = 1e-40; }},
      {"renorm_epsilon", arg, [](auto& s) { s.routing.renorm_epsilon = 1e-50; }},
      {"renorm_epsilon", arg, [](auto& s) { s.routing.renorm_epsilon = -1; }},
      {"routing.method: got 99", arg,
       [](auto& s) { s.routing.method = static_cast<RoutingMethod>(99); }},
      {"activation: kind: got 99", arg,
       [](auto& s) { s.activation.kind = static_cast<ActivationKind>(99); }},
      {"limit", arg, [](auto& s) { s.activation.limit = 0; }},
      {"limit", arg, [](auto& s) { s.activation.limit = std::numeric_limits<float>::quiet_NaN(); }},
      {"alpha", arg, [](auto& s) { s.activation.alpha = std::numeric_limits<float>::infinity(); }},
      {"activation silu: beta", arg, [](auto& s) { s.activation.beta = 1; }},
      {"activation gelu: limit", arg,
       [](auto& s) {
         s.activation.kind = ActivationKind::kGelu;
         s.activation.limit = 7;
       }},
      {"activation situ: beta", arg, [](auto& s) { s.activation.kind = ActivationKind::kSitu; }},
      {"shared: activation silu: up_limit", arg,
       [](auto& s) {
         s.shared.intermediate_size = 8;
         s.shared.activation = ActivationSpec{.up_limit = 1};
       }},
      {"shared.activation", arg, [](auto& s) { s.shared.activation = ActivationSpec(); }},
      {"hash_vocabulary", arg, [](auto& s) { s.hash_vocabulary = 5; }},
      {"hash_vocabulary: got 0", arg,
       [](auto& s) {
         s.routing.num_expert_group = s.routing.topk_group = 1;
         s.routing.method = RoutingMethod::kHash;
       }},
      {"shared.intermediate_size", arg, [](auto& s) { s.shared.intermediate_size = -1; }},
      {"shared.gated_output", arg, [](auto& s) { s.shared.gated_output = true; }},
      {"activation_dtype", StatusCode::kInvalidDType,
       [](auto& s) { s.activation_dtype = DType::kF8E4M3; }},
      {"63-bit", StatusCode::kLimitExceeded,
       [](auto& s) {
         s.hidden_size = std::int64_t{1} << 40;
         s.intermediate_size = std::int64_t{1} << 20;
       }},
  };
  for (const Refusal& c : cases) {
    MoeLayerSpec spec = grouped_spec();
    c.spoil(spec);
    const Status status = validate(spec);
    EXPECT_EQ(status.code(), c.code) << c.keyword << ": " << status.to_string();
    EXPECT_NE(status.message().find(c.keyword), std::string::npos)
        << c.keyword << " not named in: " << status.to_string();
  }
}

TEST(SpecNames, AreDistinct) {
  std::set<std::string_view> names;
  for (int m = 0; m <= static_cast<int>(RoutingMethod::kSimulated); ++m) {
    names.insert(routing_method_name(static_cast<RoutingMethod>(m)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(RoutingMethod::kSimulated) + 1);
  EXPECT_EQ(names.count("unknown"), 0U);
  EXPECT_EQ(scoring_func_name(ScoringFunc::kSqrtSoftplus), "sqrtsoftplus");
  EXPECT_EQ(scoring_func_name(ScoringFunc::kSigmoid), "sigmoid");
  EXPECT_EQ(scoring_func_name(ScoringFunc::kSoftmax), "softmax");
}

}  // namespace
}  // namespace moesaic
