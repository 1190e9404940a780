#include "layer/cuda_rank_case.h"

#include <string>
#include <utility>

#include "moesaic/device.h"

namespace moesaic::test {
namespace {

MoeLayerSpec in_fp8_blocks(MoeLayerSpec spec) {
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  spec.quant = quant_scheme_from_name("fp8-block").value();
  return spec;
}

}  // namespace

std::vector<Feature> rank_features() {
  std::vector<Feature> all;
  for (const Feature& f : rank_specs()) {
    all.push_back({f.name, [f] {
                     MoeLayerSpec spec = f.spec();
                     // A shared expert of a routed one's size joins their launch; the identity
                     // experts' one stays by itself.
                     if (spec.shared.intermediate_size > 0 && spec.routing.num_zero_experts == 0) {
                       spec.shared.intermediate_size = spec.intermediate_size;
                     }
                     return spec;
                   }});
    if (!f.spec().has_expert_bias && f.spec().routing.num_zero_experts == 0) {
      all.push_back({f.name + " fp8", [f] { return in_fp8_blocks(f.spec()); }});
    }
  }
  // Rows that the transports' kernels do not take as they are.
  all.push_back({"ragged", [] {
                   MoeLayerSpec spec = deepseek_like();
                   spec.hidden_size = 60;
                   return spec;
                 }});
  all.push_back({"ragged fp8", [] {
                   MoeLayerSpec spec = in_fp8_blocks(deepseek_like());
                   spec.hidden_size = 192;
                   return spec;
                 }});
  // Rows that are others on their way than in the layer.
  all.push_back({"normed", [] {
                   MoeLayerSpec spec = deepseek_like();
                   spec.input_norm_eps = 0.25;
                   return spec;
                 }});
  // Rows that travel as F16 and F32. F16 rows of 64 columns are the fast kernel's.
  for (const auto& [quant, hidden] : {std::pair{"f16", 64}, {"f16", 60}, {"f32", 60}}) {
    all.push_back(
        {std::string(quant) + " of " + std::to_string(hidden), [quant = quant, hidden = hidden] {
           MoeLayerSpec spec = deepseek_like();
           spec.hidden_size = hidden;
           spec.quant = quant_scheme_from_name(quant).value();
           if (spec.quant.kind == ComputeScheme::kF16) {
             spec.activation_dtype = DType::kF16;
           }
           return spec;
         }});
  }
  return all;
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
  const bool slots = c.reduction == RankReduction::kPerSlot && spec.routing.top_k > 1;
  // Gathered slots come from ranks with other rows, among which all experts are.
  const bool same_rows = c.tp > 1 && !c.sp;
  if (slots && c.transport == RankTransport::kGather && same_rows) return false;
  // Slices of experts are whole blocks of scales.
  return c.ep || spec.quant.name != "fp8-block";
}

double bound_on_gpus(const RankCombo& c) {
  return c.ep && c.transport != RankTransport::kBatched ? 1e-6 : 6e-3;
}

FusedMoE::Options two_engines(int rank, const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o = on_gpu(8);
  o.ranks.communicator = communicator;
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
