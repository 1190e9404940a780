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

// What a kernel of the gate needs of rows and weights.
std::string_view need_of(GateKernel kernel) {
  switch (kernel) {
    case GateKernel::kOneWave:
    case GateKernel::kResidentWeights:
      return "bf16 rows, or F16 as the weight has, of a multiple of 8 that fit shared memory, of "
             "F32 "
             "weights at least 64";
    case GateKernel::kTiledPipeline:
      return "bf16 rows, or F16 as the weight has, of a multiple of 8, of F32 weights at least 64";
    case GateKernel::kFp32Rows:
      return "F32 rows, and F32 weights of [256, 3072] or [128, 6144]";
    case GateKernel::kWarpPerLogit:
      break;
  }
  return "a shape or dtype that no other kernel takes";
}

// Which kernel computes the logits depends on the tokens of a call, so several may be accepted:
// first the one that the most tokens take. Weights of F32 are taken for such that bf16 has not all of
// and that are sums of three bf16 numbers; CudaGate::create looks.
void append_gate(const layer::FusedPlan& plan, Device device, Rows& rows) {
  GateParams p;
  p.parts = plan.gate_dtype == DType::kF32 ? 3 : plan.gate_dtype == DType::kF16 ? 2 : 1;
  if (plan.gate_dtype == DType::kF16 && plan.rows_dtype == DType::kF16) {
    p.x_dtype = DType::kF16;
    p.weight_f16 = true;
    p.parts = 1;
  }
  if (plan.input_norm_eps > 0 &&
      plan.rows_dtype != DType::kBF16) {  // fp32 rows of the norm's making
    p.x_dtype = DType::kF32;
    p.weight_f32 = plan.gate_dtype == DType::kF32;
    p.parts = 1;
  }
  p.experts = static_cast<std::int32_t>(plan.routing.num_experts + plan.routing.num_zero_experts);
  p.hidden = static_cast<std::int32_t>(plan.hidden_size);
  const GatePlan gate(p);
  const std::int64_t most = plan.routed.max_tokens;
  const auto status_of = [&](GateKernel kernel) {
    std::int64_t before = 0;  // tokens up to which the ranges in front reach
    for (const GateRange& range : gate.ranges()) {
      if (range.kernel == kernel) {
        return before < most ? Status()
                             : unsupported(fmt::format("max_tokens: got {}, need {} or more", most,
                                                       before + 1));
      }
      before = range.last_tokens;  // of the last one there is no limit
    }
    return unsupported(fmt::format("need {}", need_of(kernel)));
  };
  std::array<GateKernel, 5> kernels = {GateKernel::kOneWave, GateKernel::kResidentWeights,
                                       GateKernel::kFp32Rows, GateKernel::kTiledPipeline,
                                       GateKernel::kWarpPerLogit};
  std::stable_partition(kernels.begin(), kernels.end(),
                        [&](GateKernel kernel) { return kernel == gate.of(most); });
  for (const GateKernel kernel : kernels) {
    const Status own = status_of(kernel);
    rows.push_back(
        row_of("gate", std::string(gate_kernel_name(kernel)),
               device.is_cuda() ? own : layer::on_other_device(own, device, "a Hopper GPU")));
  }
}

// Where shared experts run: beside the routed ones, as one more of them, or on the same stream
// before or after them.
std::string sm90_stage_order(const layer::FusedPlan& plan, bool gated_shared) {
  std::string order = plan.has_gate ? "gate, router" : "router";
  const bool travels = plan.ranks.active && plan.ranks.transport != RankTransport::kNone;
  if (travels) order += ", dispatch";
  order += ", experts";
  if (plan.has_shared && shared_joins(plan, gated_shared)) {
    order += " (shared_experts as one more of them)";
  } else if (plan.shared_stream && plan.adds_shared) {
    order += " (shared_experts meanwhile, on a second stream from the gate on)";
  } else if (plan.has_shared) {
    order += " and shared_experts one after the other on one stream";
  }
  if (travels) order += ", combine";
  return order;
}

Status rows_stay(const layer::FusedPlan& plan) {
  const RankTransport transport = plan.ranks.transport;
  if (!plan.ranks.active || transport == RankTransport::kNone) return {};
  return unsupported(fmt::format("transport: got {}, need none", rank_transport_name(transport)));
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
      // Without transport the experts gather their own rows and combine them. The transports of
      // all devices are rows of one catalogue, which the CPU's engine lists.
      rows.push_back(row_of("prepare_finalize", "cuda_in_experts", on_gpu(rows_stay(plan))));
      if (plan.ranks.active && device.is_cuda()) {
        for (const char* name : {"cuda_peer_all_to_all", "cuda_peer_gather"}) {
          rows.push_back(
              row_of("prepare_finalize", name, layer::peer_windows_fit(plan.ranks, device)));
        }
      }
      return;
  }
}

std::string sm90_determinism(const layer::FusedPlan& plan) {
  const Result<LayerExperts> with = choose_layer_experts(plan);
  if (!with.ok()) return {};  // refused before anyone asks
  const GpuBackend* const shared = with->shared;
  return layer::layer_determinism(with->routed->name, with->routed->determinism,
                                  shared != nullptr ? shared->name : std::string_view(),
                                  shared != nullptr ? shared->determinism : std::string_view());
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
  MOESAIC_ASSIGN_OR_RETURN(const LayerExperts with, choose_layer_experts(plan));
  explanation.experts_backend = std::string(with.routed->name);
  explanation.determinism = sm90_determinism(plan);
  explanation.stage_order = sm90_stage_order(plan, spec.shared.gated_output);
  return {};
}

}  // namespace moesaic::cuda
