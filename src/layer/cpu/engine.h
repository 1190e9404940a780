// The CPU engine: the stages of a layer one after the other on this machine's memory. What it holds
// and the steps of its call.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/arena.h"
#include "core/fault.h"
#include "cpu/kernels.h"
#include "layer/cpu/row_sums.h"
#include "layer/engine.h"
#include "layer/expert_balancer.h"
#include "layer/rank_mesh.h"
#include "moesaic/gate.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/router.h"

namespace moesaic::layer {

// Buffers of one call of at most max_tokens rows; null while measuring.
struct CpuBuffers {
  float* logits = nullptr;            // [C, E + zero experts]
  float* topk_weights = nullptr;      // [C, k]
  std::int32_t* topk_ids = nullptr;   // [C, k]
  float* normed = nullptr;            // [C, H]: what the router sees, with an input norm
  std::byte* latent = nullptr;        // [C, latent], dtype of the hidden states (normed: F32)
  float* routed = nullptr;            // [C, latent]
  float* routed_back = nullptr;       // [C, H], after the output transform
  float* shared = nullptr;            // [C, H]
  float* shared_gate = nullptr;       // [C]
  float* ones = nullptr;              // [C]: the shared expert's weight ...
  std::int32_t* zeros = nullptr;      // [C]: ... and id
  std::byte* zero_experts = nullptr;  // [C, H] F32
  // Per-slot reduction: every slot as a row with one expert.
  std::byte* slot_input = nullptr;  // [C * k, latent], dtype of the kernel's input
  float* slot_weights = nullptr;    // [C * k]
  float* slot_output = nullptr;     // [C * k, latent]

  static Result<CpuBuffers> carve(const FusedPlan& plan, const FusedMoE::Options& options,
                                  std::int64_t rows, Arena& arena);
};

inline std::int64_t logit_columns(const FusedPlan& plan) {
  return plan.routing.num_experts + plan.routing.num_zero_experts;
}
// The routed experts may round straight into the caller's output when nothing is added to or
// multiplied with their result, and that may not be what they read.
inline bool writes_output_directly(const FusedPlan& plan, const FusedMoE::Options& options) {
  const bool apart = !options.inplace || MOESAIC_FAULT(layer_writes_what_it_reads);
  return apart && !plan.adds_shared && !plan.has_zero_experts && !options.transform.output &&
         plan.output_scale == 1.0F && plan.ranks.reduced && !plan.ranks.per_slot;
}

struct CpuEngine final : public LayerEngine {
  MoeLayerSpec spec;
  FusedPlan plan;
  FusedMoE::Options options;
  const RankMesh* mesh = nullptr;  // null: this layer does not communicate
  // What no world changes, shared with the engines that in_world makes of this one.
  std::shared_ptr<const GateLinear> gate;  // none: callers bring their routing
  std::shared_ptr<const Router> router;
  std::shared_ptr<const ModularKernel> shared;
  std::shared_ptr<const GateLinear> shared_gate;
  std::shared_ptr<const Tensor> experts_norm_weight;  // [H] F32; plan.input_norm_eps > 0
  std::unique_ptr<ModularKernel> kernel;              // the routed experts
  std::unique_ptr<ExpertBalancer> expert_balancer;
  std::int64_t small_bytes = 0;  // gate and shared gate weights
  Tensor workspace;
  const cpu::CpuKernels* kernels = nullptr;  // of the tier that computes
  int num_threads = 1;                       // at most: cpu/team.h

  // Rows of a call with their routing: what the kernel is given.
  struct RoutedRows {
    ConstTensorView x;                  // [n, H]
    const float* weights = nullptr;     // [n, k]
    const std::int32_t* ids = nullptr;  // [n, k]
  };
  // Where combine finds the parts of row t of the call: row t - routed_first of the routed result,
  // t - shared_first of the shared one.
  struct CombineRows {
    RowRange rows;
    std::int64_t routed_first = 0, shared_first = 0;
  };

  static Result<std::unique_ptr<LayerEngine>> create(const EngineParts& parts);

  Status forward_host(const FusedMoE::Args& args) const override;
  Status forward_pair(const FusedMoE::Args& first, const FusedMoE::Args& second) const override;
  Status enqueue(Stream stream, const FusedMoE::Args& args) const override;
  std::string_view experts_backend() const override { return kernel->experts().name(); }
  std::int64_t weight_bytes() const override;
  std::int64_t workspace_bytes() const override;
  std::string determinism() const override;
  ExpertBalancer* balancer() const override { return expert_balancer.get(); }
  Result<std::vector<ExpertPart>> expert_parts() const override;
  Result<std::unique_ptr<LayerEngine>> in_world(const FusedPlan& new_plan,
                                                const FusedMoE::Options& new_options,
                                                const RankMesh* new_mesh,
                                                ExpertSource& source) const override;

  // The stages and their workspace (engine.cc).
  Status build_stages(MoeLayerWeights& weights);
  Status build_routed(ExpertSource& source);
  Status build_workspace();
  Status build_shared(ExpertSource* source, const MoeLayerTensors& tensors);
  // A call over ranks whose rows are on their way, or the results of its rows.
  struct Flight {
    const FusedMoE::Args* args = nullptr;
    CpuBuffers b;
    RowRange all, share, given;  // of this rank; of this replica; what the kernel is given
    RoutedRows rows;             // given
    std::optional<ModularKernel::Call> call;
  };

  // The steps of a call (forward.cc); over ranks in forward_ranks.cc.
  // The buffers of a call, of the first or the second of two that are under way.
  Result<CpuBuffers> buffers(int slot, std::int64_t rows) const;
  Status kernel_failure(const Status& status) const;
  Result<Flight> depart(const FusedMoE::Args& args, int slot) const;
  Status compute(Flight& flight) const;
  Status arrive(Flight& flight) const;
  Status combine_over_ranks(const Flight& flight) const;
  RowRange shared_rows_of(const Flight& f) const;
  Status share_shared(const Flight& f) const;
  // b.topk_weights and b.topk_ids, by as many stages as the caller has left.
  Status route(const FusedMoE::Args& args, const CpuBuffers& b) const;
  Status compute_logits(const FusedMoE::Args& args, const CpuBuffers& b) const;
  Status select_experts(const FusedMoE::Args& args, const CpuBuffers& b) const;
  void take_routing(const FusedMoE::Args& args, const CpuBuffers& b) const;
  Status run_routed(const RoutedRows& rows, const CpuBuffers& b, const TensorView& output,
                    std::span<RowNumerics> numerics = {}) const;
  // The two halves of run_routed, around the kernel's call; args.numerics stays empty.
  Result<ModularKernel::Args> routed_args(const RoutedRows& rows, const CpuBuffers& b,
                                          const TensorView& output) const;
  Status finish_routed(const RoutedRows& rows, const CpuBuffers& b) const;
  ModularKernel::Args slot_args(const ConstTensorView& input, const RoutedRows& rows,
                                const CpuBuffers& b) const;
  Status add_slots(const RoutedRows& rows, const CpuBuffers& b) const;
  // Adds to `numerics` unless that is empty.
  Status run_shared(const ConstTensorView& x, const CpuBuffers& b,
                    std::span<RowNumerics> numerics = {}) const;
  // args.output, and args.shared_output where it is there.
  void combine(const CombineRows& c, const CpuBuffers& b, const FusedMoE::Args& args) const;
  void store_shared(const CombineRows& c, const CpuBuffers& b, const TensorView& to) const;
  void add_up(const std::array<RowPart, 3>& parts, RowRange rows, const TensorView& output) const {
    add_row_parts(*kernels, parts, rows, output, num_threads);
  }
  void clear_padding(const FusedMoE::Args& args) const;
};

// --- The row of the catalogue (explain.cc) ---

// Which experts backend computes a problem: the first accepted, or the forced one. A shared expert
// is a different problem, which a backend forced for the routed experts may refuse; then the choice
// is automatic there.
Result<const ExpertsBackend*> choose_layer_experts(const MoeProblem& problem,
                                                   const std::string& forced, bool shared);
void append_cpu_candidates(ExplainStage stage, const FusedPlan& plan, std::string_view router_name,
                           Device device, std::vector<CandidateReport>& rows);
Status explain_cpu_engine(const FusedPlan& plan, const MoeLayerSpec& spec,
                          const FusedMoE::Options& options, LayerExplanation& explanation);

inline constexpr LayerEngineRow kCpuEngine = {
    .name = "cpu",
    .serves = [](Device device) { return !device.is_cuda(); },
    .slots_as_rows = true,
    .append_candidates = &append_cpu_candidates,
    .explain = &explain_cpu_engine,
    .create = &CpuEngine::create,
};

}  // namespace moesaic::layer
