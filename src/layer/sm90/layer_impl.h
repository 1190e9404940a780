// What a CudaLayer holds, and the steps of its call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cuda/device_memory.h"
#include "cuda/last_call.h"
#include "cuda/side_stream.h"
#include "experts/sm90/experts.h"
#include "gate/sm90/gate_linear.h"
#include "layer/expert_balancer.h"
#include "layer/rank_mesh.h"
#include "layer/sm90/device_balance.h"
#include "layer/sm90/layer.h"
#include "layer/sm90/layer_ops.h"
#include "layer/sm90/prologue_plan.h"
#include "moesaic/modular_kernel.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/device_messages.h"
#include "prepare_finalize/sm90/peer_all_to_all.h"
#include "router/sm90/router.h"

namespace moesaic::cuda {

struct CudaLayer::Impl {
  layer::FusedPlan plan;
  const layer::RankMesh* mesh = nullptr;  // null: this layer does not communicate
  std::int64_t max_tokens = 0;
  int device = 0;
  std::optional<CudaGate> gate, shared_gate;  // no gate: callers bring their routing
  std::unique_ptr<CudaRouter> router;
  bool joins = false;                         // the shared expert is the last of `experts`
  std::unique_ptr<CudaRouter> joined_router;  // with a constant last slot for it
  // Weight of the shared expert per token: the sigmoid of its gate's logit, as top-1 of one expert.
  std::unique_ptr<CudaRouter> shared_router;
  LayerExperts chosen;  // which experts these are
  std::unique_ptr<GpuExperts> experts, shared;
  Allocation expert_map;
  Allocation experts_norm_weight;  // [H] F32, with an input norm
  // Of a layer whose experts move: slots are the experts of everything behind the router.
  std::unique_ptr<layer::ExpertBalancer> balancer;
  DeviceBalance* balance = nullptr;  // its memory
  Allocation ones, shared_ids;       // [max_tokens]: weight and id of an ungated shared expert
  Allocation workspace;
  LastCall last_call;              // that enqueue left on some stream
  LayerDeviceFunctions functions;  // of the caller's
  // FusedPlan::shared_stream: where shared experts run, for one call at a time.
  struct Beside {
    SideStreams streams;
    std::mutex mutex;
  };
  std::unique_ptr<Beside> beside;
  ProloguePlan apart, joined;  // the routed experts by themselves, with the shared one among them
  // Over ranks: how rows travel (null: they do not), and the sums of ranks with the same rows.
  std::unique_ptr<PrepareAndFinalize> transport;
  std::int64_t transport_bytes = 0;
  CudaPeerAllToAll* peers = nullptr;  // the transport, where it goes through peer windows
  std::string no_peers;               // why not, where it might have
  std::int64_t pair_capacity = 0;     // pair_capacity_of
  std::optional<DeviceReplicas> replicas;
  Allocation slot_rows;  // [max_tokens * k, H], per-slot reduction where no row travels

  // Buffers of forward_chunk: what host tensors are copied through.
  struct Staging {
    Allocation x, x_bf16, output, shared_output, logits, weights, ids, input_ids, padding;
  };
  mutable Staging staging;

  Status create_experts(const layer::EngineParts& parts);
  Status create_shared(const MoeLayerSpec& spec, const FusedMoE::Options& options,
                       MoeLayerWeights& weights);
  Status create_own(const layer::EngineParts& parts);
  Status create_ranks(const FusedMoE::Options& options);
  // In the place of create_ranks: this rank has no layer. Returns `reason`.
  Status withdraw_from_ranks(const Status& reason) const;
  Status make_staging() const;
  // Which transport, and its memory.
  Status create_transport(const FusedMoE::Options& options);
  // Before the first launch of a call, collective: steps to take, 0 when no rank has rows. `parts`:
  // the call has shared_output.
  Result<std::int64_t> start_call(void* stream, const Status& checked, std::int64_t rows,
                                  bool parts) const;
  // Returns a failure of this rank in a call, which all ranks then learn of.
  Status give_up(void* stream, const Status& status) const;
  // What enqueue and forward_chunk are given.
  Status check(const FusedMoE::Args& args) const;
  Status forward_host(const FusedMoE::Args& args) const;
  // Rows of a step of a call with more than max_tokens; 0: such a call is refused.
  std::int64_t rows_at_once(const FusedMoE::Args& args) const;
  // A step of enqueue: at most max_tokens rows, checked.
  Status enqueue_rows(Stream stream, const FusedMoE::Args& args) const;
  Result<LayerWorkspace> carve(std::int64_t tokens) const;
  // What the caller knows of the rows' routing, as in FusedMoE::Args; null where it does not.
  struct Given {
    const void* logits = nullptr;
    DType logits_dtype = DType::kF32;
    const float* weights = nullptr;
    const void* ids = nullptr;
    DType ids_dtype = DType::kI32;
    const std::int32_t* input_ids = nullptr;
    const std::uint8_t* padding = nullptr;
  };
  // x is what the gate (and the zero experts) read, x_bf16 the same rows for experts that take no
  // other.
  struct Rows {
    const void* x = nullptr;
    DType x_dtype = DType::kBF16;
    const void* x_bf16 = nullptr;
    std::int64_t tokens = 0;
    Given given = {};
  };
  struct Out {
    void* output = nullptr;
    DType dtype = DType::kBF16;
    void* shared = nullptr;  // the shared experts' part apart, or null
    DType shared_dtype = DType::kBF16;
    float* logits = nullptr;  // traces, or null
    float* topk_weights = nullptr;
    std::int32_t* topk_ids = nullptr;
    std::span<RowNumerics> numerics = {};  // host memory: the call waits between its parts
  };
  Status run(void* stream, const Rows& rows, const Out& out) const;
  Status run_rows(void* stream, const Rows& rows, const Out& out) const;
  // The shared experts beside the routed ones, whose sum a kernel joins with theirs.
  Status run_beside(void* stream, const Rows& rows, LayerWorkspace& w, const Out& out) const;
  // Gate, router and transform, then the routed experts with nothing else to w.routed.
  Status run_routed_part(void* stream, const Rows& rows, const LayerWorkspace& w) const;
  // `ids` of `slots` slots without those of identity experts, which arrive as expert 0 with weight 0:
  // it is not to be computed (an infinity there would reach the row), no row need travel for them,
  // and they are no load.
  Status drop_identity_slots(void* stream, const LayerWorkspace& w, std::int64_t slots,
                             const std::int32_t*& ids) const;
  // Output of w.routed and, if `with_shared`, what shared_to_workspace made.
  Status finish_rows(void* stream, const Rows& rows, const LayerWorkspace& w, float* sum,
                     bool with_shared, const Out& out) const;
  bool joins_call(const Rows& rows, const Out& out) const {
    return joins && plan.adds_shared && out.shared == nullptr && rows.tokens <= kJoinedTokens;
  }
  // Where either holds, hidden states and outputs may have any float dtype.
  bool takes_any_rows() const { return cuda::takes_any_rows(plan, chosen); }
  bool takes_rounded_rows() const { return rounds_rows(plan, chosen); }
  // Rows that the gate and the routed experts see instead, where there is an input norm.
  Status normalise(void* stream, const Rows& rows, const LayerWorkspace& w) const;
  // The traces instead of the workspace's arrays, and the caller's logits in the place of the gate's.
  Status take_given_logits(void* stream, const Rows& rows, const Out& out, LayerWorkspace& w) const;
  // Gives the ids of the call's rows, a row's `stride` apart, to the caller's function.
  Status capture_ids(void* stream, const std::int32_t* ids, std::int64_t stride,
                     std::int64_t tokens) const;
  Status clear_padding(void* stream, const Rows& rows, const Out& out) const;
  // Copies what the caller gives of the routing to the device.
  Result<Given> stage_given(const FusedMoE::Args& args) const;
  // The same over ranks, collective (layer_ranks.cc).
  Status run_over_ranks(void* stream, const Rows& rows, const Out& out) const;
  Status run_rows_over_ranks(void* stream, const Rows& rows, const Out& out) const;
  Status run_given(const PrepareArgs& given, const LayerWorkspace& w) const;
  bool peers_finish() const;
  Status run_experts(void* stream, const Prepared& rows, const LayerWorkspace& w) const;
  Status run_slots_here(void* stream, Prepared here, const LayerWorkspace& w) const;
  // Of all rows, as those that travel: of row_dtype(plan.routed).
  Result<const void*> carried_rows(void* stream, const Rows& rows, const LayerWorkspace& w) const;
  Status gather_replicas(void* stream, void* rows, DType dtype, std::int64_t tokens) const;
  // At the end of create: `joined` and `apart`, for as many tokens as either may matter.
  Status make_prologue_plans();
  Result<ProloguePlace> prologue_place(std::int64_t tokens, DType x_dtype, bool with_shared) const;
  // Gate and router, as far as the caller leaves them to the layer. `next`: the experts' call that
  // follows at once, or null. Where the plan puts its prologue in the gate's or the router's kernel,
  // next->in_front is set.
  Status route(void* stream, const Rows& rows, const LayerWorkspace& w, bool with_shared,
               CudaExpertsArgs* next) const;
  static CudaRows rows_of(const GpuExperts& experts, const Rows& rows) {
    return experts.takes_any_rows() ? CudaRows::values(rows.x, rows.x_dtype)
                                    : CudaRows::bf16(rows.x_bf16);
  }
  CudaExpertsArgs routed_args(const Rows& rows, const LayerWorkspace& w) const;
  Status run_joined(void* stream, const Rows& rows, const LayerWorkspace& w, const Out& out) const;
  // The layer's own. `kept`: the routed experts' call before this one had the same rows.
  Status run_shared(void* stream, const Rows& rows, const LayerWorkspace& w, const CudaResult& to,
                    bool kept, std::span<RowNumerics> numerics) const;
  // Those or the caller's, to be added (w.shared_rows, w.shared_sums), or apart to `to` [tokens, H].
  Status shared_to_workspace(void* stream, const Rows& rows, const LayerWorkspace& w, bool kept,
                             std::span<RowNumerics> numerics) const;
  Status shared_apart(void* stream, const Rows& rows, const LayerWorkspace& w, void* to,
                      DType dtype, bool kept, std::span<RowNumerics> numerics) const;
  void add_shared(const LayerWorkspace& w, LayerCombineParams& to) const;
  // The caller's functions (layer_functions.cc).
  Status shared_function(void* stream, const Rows& rows, float* to) const;
  Status transform_input(void* stream, const void* x_bf16, std::int64_t tokens,
                         const LayerWorkspace& w) const;  // w.latent
  // w.routed_back of w.routed, which are scaled before.
  Status transform_output(void* stream, std::int64_t tokens, const LayerWorkspace& w) const;
  Status run_routed(void* stream, CudaExpertsArgs a, const void* shared_rows, void* to, DType dtype,
                    std::span<RowNumerics> numerics) const;
  // Adds what a call left in its workspace, `factor` times; nothing when `numerics` is empty.
  static Status measure(void* stream, const GpuExperts& experts, const CudaExpertsArgs& a,
                        double factor, std::span<RowNumerics> numerics);
};

}  // namespace moesaic::cuda
