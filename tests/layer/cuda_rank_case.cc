#include "layer/cuda_rank_case.h"

#include "moesaic/device.h"

namespace moesaic::test {
namespace {

// The shared expert has the size of a routed one.
MoeLayerSpec deepseek() {
  MoeLayerSpec spec = deepseek_like();
  spec.num_experts = spec.routing.num_experts = 12;
  spec.routing.top_k = 4;
  spec.shared.intermediate_size = 32;
  return spec;
}
MoeLayerSpec llama() {
  MoeLayerSpec spec = llama4_like();
  spec.shared.intermediate_size = 32;
  spec.shared.gated_output = true;
  return spec;
}
MoeLayerSpec in_fp8_blocks(MoeLayerSpec spec) {
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  spec.quant = quant_scheme_from_name("fp8-block").value();
  return spec;
}
MoeLayerSpec biased() {
  MoeLayerSpec spec = small_spec();
  spec.has_router_bias = spec.has_expert_bias = true;
  spec.activation = make_activation("swigluoai").value();
  spec.routing.scale_on_output = true;
  spec.routing.routed_scaling_factor = 3.0;
  return spec;
}
MoeLayerSpec with_zero_experts() {
  MoeLayerSpec spec = small_spec();
  spec.routing.method = RoutingMethod::kZeroExpert;
  spec.routing.has_correction_bias = true;
  spec.routing.num_zero_experts = 3;
  spec.routing.top_k = 3;
  spec.shared.intermediate_size = 16;
  return spec;
}

}  // namespace

std::vector<Feature> rank_features() {
  return {{"deepseek", deepseek}, {"deepseek fp8", [] { return in_fp8_blocks(deepseek()); }},
          {"llama", llama},       {"llama fp8", [] { return in_fp8_blocks(llama()); }},
          {"biased", biased},     {"zero experts", with_zero_experts}};
}

RankProblem gpu_problem(const LayerTensors& tensors, std::int64_t tokens) {
  RankProblem p;
  p.make = maker_of(tensors);
  p.options = on_gpu(5);
  p.x = random_hidden(77, tokens, tensors.spec.hidden_size);
  solve_on_one_rank(p);
  return p;
}

bool runs_on_gpus(const RankCombo& c, const MoeLayerSpec& spec) {
  if (c.transport == RankTransport::kBatched) return false;
  const bool slots = c.reduction == RankReduction::kPerSlot && spec.routing.top_k > 1;
  if (slots && c.transport == RankTransport::kGather) return false;
  // Slices of experts are whole blocks of scales.
  return c.ep || spec.quant.name != "fp8-block";
}

double bound_on_gpus(const RankCombo& c) { return c.ep ? 1e-6 : 6e-3; }

FusedMoE::Options two_engines(int rank, const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o = on_gpu(8);
  o.communicator = communicator;
  o.parallel.ep_size = o.parallel.dp_size = 2;
  o.parallel.ep_rank = o.parallel.dp_rank = rank;
  return o;
}

std::vector<int> usable_devices() {
  std::vector<int> devices;
  for (const CudaDeviceInfo& d : query_cuda().devices) {
    if (d.available) devices.push_back(d.index);
  }
  return devices;
}

}  // namespace moesaic::test
