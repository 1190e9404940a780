#include "layer/layer_specs.h"

namespace moesaic::test {

MoeLayerSpec small_spec() {
  MoeLayerSpec spec;
  spec.hidden_size = 64;
  spec.intermediate_size = 32;
  spec.num_experts = spec.routing.num_experts = 8;
  spec.routing.top_k = 2;
  spec.routing.renormalize = true;
  spec.quant = quant_scheme_from_name("bf16").value();
  return spec;
}

MoeLayerSpec with_shared(bool gated) {
  MoeLayerSpec spec = small_spec();
  spec.shared.intermediate_size = 48;
  spec.shared.gated_output = gated;
  return spec;
}

MoeLayerSpec scaled_output() {
  MoeLayerSpec spec = with_shared(true);
  spec.routing.routed_scaling_factor = 2.5;
  spec.routing.scale_on_output = true;
  return spec;
}

void use_grouped_routing(RoutingSpec& routing, std::int64_t groups, std::int64_t topk_group) {
  routing.method = RoutingMethod::kGroupedTopK;
  routing.scoring_func = ScoringFunc::kSigmoid;
  routing.has_correction_bias = true;
  routing.num_expert_group = groups;
  routing.topk_group = topk_group;
  routing.routed_scaling_factor = 2.5;
}

MoeLayerSpec deepseek_like() {
  MoeLayerSpec spec = with_shared(false);
  use_grouped_routing(spec.routing, 4, 2);
  return spec;
}

MoeLayerSpec llama4_like() {
  MoeLayerSpec spec = with_shared(false);
  spec.routing.method = RoutingMethod::kLlama4;
  spec.routing.renormalize = false;
  spec.routing.top_k = 1;
  spec.apply_router_weight_on_input = true;
  return spec;
}

MoeLayerSpec with_identity_experts() {
  MoeLayerSpec spec = small_spec();
  spec.routing.method = RoutingMethod::kZeroExpert;
  spec.routing.has_correction_bias = true;
  spec.routing.num_zero_experts = 3;
  spec.routing.top_k = 3;
  spec.shared.intermediate_size = 16;
  return spec;
}

MoeLayerSpec hash_routed() {
  MoeLayerSpec spec = with_shared(false);
  spec.routing.method = RoutingMethod::kHash;
  spec.routing.scoring_func = ScoringFunc::kSqrtSoftplus;
  spec.routing.routed_scaling_factor = 1.5;
  spec.hash_vocabulary = 11;
  return spec;
}

std::vector<Feature> routing_features() {
  const auto routed_by = [](auto change) {
    return [change] {
      MoeLayerSpec spec = small_spec();
      change(spec);
      return spec;
    };
  };
  std::vector<Feature> all = common_features();
  all.push_back({"scaled output", scaled_output});
  all.push_back({"identity experts", with_identity_experts});
  all.push_back({"top-k of biased sigmoids", routed_by([](MoeLayerSpec& s) {
                   s.routing.scoring_func = ScoringFunc::kSigmoid;
                   s.routing.has_correction_bias = true;
                   s.routing.routed_scaling_factor = 2.5;
                 })});
  all.push_back({"top-k softmax", routed_by([](MoeLayerSpec& s) {
                   s.routing.method = RoutingMethod::kTopKSoftmax;
                   s.has_router_bias = true;
                 })});
  all.push_back({"p-norm", routed_by([](MoeLayerSpec& s) {
                   s.routing.method = RoutingMethod::kPNorm;
                   s.routing.p_norm = 2;
                   s.routing.renormalize = false;
                 })});
  all.push_back({"sparse mixer", routed_by([](MoeLayerSpec& s) {
                   s.routing.method = RoutingMethod::kSparseMixer;
                   s.routing.jitter_eps = 0.01;
                   s.routing.renormalize = false;
                 })});
  return all;
}

std::vector<Feature> common_features() {
  return {{"plain", small_spec},
          {"shared", [] { return with_shared(false); }},
          {"gated shared", [] { return with_shared(true); }},
          {"deepseek", deepseek_like},
          {"llama4", llama4_like}};
}

FusedMoE::Options on_gpu(std::int64_t max_tokens) {
  FusedMoE::Options options;
  options.device = Device::cuda(0);
  options.max_tokens = max_tokens;
  return options;
}

}  // namespace moesaic::test
