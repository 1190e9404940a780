// What explain says of a layer on a Hopper GPU: candidates of the stages, workspace. No device, in
// any build.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "core/refusal.h"
#include "experts/sm90/experts.h"
#include "gate/sm90/gate.h"
#include "layer/sm90/layer.h"
#include "router/sm90/router.h"

namespace moesaic::cuda {
namespace {

using Rows = std::vector<CandidateReport>;

CandidateReport row_of(std::string stage, std::string name, const Status& status) {
  return {std::move(stage), std::move(name), status.message(), status.ok()};
}

// Which kernel computes the logits depends on the tokens of a call, so several may be accepted: first
// the one that the most tokens take.
void append_gate(const layer::FusedPlan& plan, Device device, Rows& rows) {
  GateParams p;
  p.weight_f32 = plan.gate_dtype != DType::kBF16;
  p.experts = static_cast<std::int32_t>(plan.routing.num_experts + plan.routing.num_zero_experts);
  p.hidden = static_cast<std::int32_t>(plan.hidden_size);
  const auto kernel_for = [&](std::int64_t tokens) {
    p.tokens = std::min(tokens, plan.routed.max_tokens);
    return choose_gate_kernel(p);
  };
  const GateKernel of_most_tokens = kernel_for(plan.routed.max_tokens);
  const auto used = [&](GateKernel kernel) {
    for (const std::int64_t tokens : {1, 16, 17, 32, 33, 64, 96, 128, 129}) {
      if (kernel_for(tokens) == kernel) return true;
    }
    return of_most_tokens == kernel;
  };
  struct Need {
    GateKernel kernel;
    std::string_view text;
  };
  std::array<Need, 5> needs = {{
      {GateKernel::kOneWave, "bf16 weights with rows of a multiple of 8 that fit shared memory"},
      {GateKernel::kResidentWeights, "such weights and over 16 tokens"},
      {GateKernel::kFp32Rows, "fp32 weights of [256, 3072] or [128, 6144]"},
      {GateKernel::kTiledPipeline, "bf16 weights with rows of a multiple of 8 and over 64 tokens"},
      {GateKernel::kWarpPerLogit, "a shape or dtype that no other kernel takes"},
  }};
  std::stable_partition(needs.begin(), needs.end(),
                        [&](const Need& need) { return need.kernel == of_most_tokens; });
  for (const Need& need : needs) {
    const Status own =
        used(need.kernel) ? Status() : unsupported(fmt::format("need {}", need.text));
    rows.push_back(
        row_of("gate", std::string(gate_kernel_name(need.kernel)),
               device.is_cuda() ? own : layer::on_other_device(own, device, "a Hopper GPU")));
  }
}

}  // namespace

void append_sm90_candidates(layer::ExplainStage stage, const layer::FusedPlan& plan,
                            std::string_view router_name, Device device,
                            std::vector<CandidateReport>& rows) {
  const auto on_gpu = [&](const Status& own) {
    return device.is_cuda() ? own : layer::on_other_device(own, device, "a Hopper GPU");
  };
  switch (stage) {
    case layer::ExplainStage::kGate:
      return append_gate(plan, device, rows);
    case layer::ExplainStage::kRouter:
      rows.push_back(row_of("router", fmt::format("cuda_{}", router_name),
                            on_gpu(CudaRouter::can_implement(plan.routing))));
      return;
    case layer::ExplainStage::kPrepareFinalize:
      // The experts gather their own rows and combine them.
      rows.push_back(row_of("prepare_finalize", "cuda_in_experts", on_gpu({})));
      return;
  }
}

std::string sm90_determinism(const layer::FusedPlan& plan) {
  return layer::layer_determinism(kCudaExpertsName, kCudaExpertsDeterminism,
                                  plan.has_shared ? kCudaExpertsName : std::string_view(),
                                  plan.has_shared ? kCudaExpertsDeterminism : std::string_view());
}

Status explain_sm90_engine(const layer::FusedPlan& plan, const MoeLayerSpec& spec,
                           const FusedMoE::Options& options, LayerExplanation& explanation) {
  MOESAIC_RETURN_IF_ERROR(CudaLayer::can_implement(plan, options));
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(
      const LayerWorkspace unused,
      LayerWorkspace::carve(plan, spec.shared.gated_output, options.max_tokens, arena));
  static_cast<void>(unused);
  explanation.workspace_bytes = arena.used();
  explanation.experts_backend = std::string(kCudaExpertsName);
  explanation.determinism = sm90_determinism(plan);
  return {};
}

}  // namespace moesaic::cuda
