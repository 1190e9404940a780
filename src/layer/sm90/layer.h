// The layer on one Hopper GPU: gate, router, experts, shared experts and their sum on one stream.
// The engine of FusedMoE for such a device; what it takes is decided without one.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/arena.h"
#include "experts/cuda_general/gpu_backends.h"
#include "layer/engine.h"
#include "layer/fused_plan.h"
#include "moesaic/checkpoint.h"
#include "moesaic/device.h"
#include "moesaic/fused_moe.h"

namespace moesaic::cuda {

// Which experts of GPUs compute the routed and the shared experts. kUnsupported with the reasons of
// all, the stage in front.
struct LayerExperts {
  const GpuBackend* routed = nullptr;
  const GpuBackend* shared = nullptr;             // null: no shared experts
  bool routed_wide = false, shared_wide = false;  // GpuBackend::takes_any_rows
  // Some keep rows in fp32 where the sm_90 kernel has bf16: sums are finished by the layer.
  bool any_wide() const { return routed_wide || shared_wide; }
  // All take hidden states of any float dtype.
  bool all_wide() const { return routed_wide && (shared == nullptr || shared_wide); }
  // As which they hold the rows of slots before the sum.
  DType slot_dtype() const { return routed_wide ? DType::kF32 : DType::kBF16; }
};
Result<LayerExperts> choose_layer_experts(const layer::FusedPlan& plan);
// Hidden states may come in every float dtype, and all that reads them takes them so.
bool takes_any_rows(const layer::FusedPlan& plan, const LayerExperts& chosen);
// They may, as the model has F16 or F32, though experts, a function or ranks take bf16: the layer
// rounds them for these. The gate reads them as they are.
bool rounds_rows(const layer::FusedPlan& plan, const LayerExperts& chosen);

// Of the normalised rows that the routed experts are given (FusedPlan::input_norm_eps): BF16 where
// models in bf16 have theirs so, whichever experts compute.
DType normed_dtype(const layer::FusedPlan& plan, const LayerExperts& chosen);

// RankOptions::pair_capacity as the experts have it (CudaExpertsArgs::pair_capacity): 0 where there is
// none, or as much room as for every pair. kUnsupported: experts or rows that cannot have one.
Result<std::int64_t> pair_capacity_of(const layer::FusedPlan& plan, const LayerExperts& chosen);

// A shared expert that looks like a routed one (same sizes, scheme and activation, always weight 1)
// joins the routed experts as one more, chosen by every token in its last slot: its weights come in
// the same stream of copies and its row is added last, as it is apart from them. Above
// kJoinedTokens rows the gain is gone and the rows of an extra slot are not worth their memory: the
// two are then run one after the other on the same weights. The bits are the same.
inline constexpr std::int64_t kJoinedTokens = 4096;
bool shared_joins(const layer::FusedPlan& plan, bool gated_shared);
// What the experts object is made for: the routed experts, and the shared one when it joins.
MoeProblem experts_problem(const layer::FusedPlan& plan, bool gated_shared);

// The workspace of one call, all pieces 256-byte aligned; pointers are null while measuring. The
// shared experts run before the routed ones (their rows then lie in the output) or after them,
// never at the same time: both use the same memory, unless they have streams of their own
// (FusedPlan::shared_stream). Over ranks the experts see the rows of others.
struct LayerWorkspace {
  float* logits = nullptr;        // [M, E + zero experts]
  float* topk_weights = nullptr;  // [M, k], or [M, k + 1] with a joined expert
  std::int32_t* topk_ids = nullptr;
  float* zero_weight = nullptr;     // [M], with zero experts
  float* shared_logits = nullptr;   // [M], gated shared experts ...
  float* shared_weights = nullptr;  // [M]
  std::int32_t* shared_ids = nullptr;
  float* routed = nullptr;  // [M, latent], when something is multiplied with or added to the result
  std::uint16_t* latent = nullptr;  // [M, latent], what a transform makes of the rows
  // With an input norm: what the gate sees (NormRowsParams: rows of BF16 as `scaled`, in the memory of
  // `normed`, with factors), and what the routed experts do.
  float* normed = nullptr;        // [M, H], with a gate
  float* row_factors = nullptr;   // [M], with a gate
  std::byte* weighted = nullptr;  // [M, H] of weighted_dtype
  DType weighted_dtype = DType::kBF16;
  float* routed_back = nullptr;  // [M, H], what one makes of the result
  float* shared_sums = nullptr;  // [M, H], of shared experts that are the caller's function
  // Where rounds_rows: hidden states that came otherwise, and sums on their way to F16.
  std::uint16_t* rows_bf16 = nullptr;  // [M, H]
  float* rows_wide = nullptr;          // [M, H], where no other piece has such sums
  // Over ranks: rows that travel in another dtype than bf16 (at the end: sums on their way to F16), the
  // same on their way to F16, and ids of slots of experts that move. With zero experts on one GPU
  // too: ids without their slots.
  float* carried = nullptr;          // [M, H] F32 or F16
  float* carried_wide = nullptr;     // [M, H]
  std::int32_t* sent_ids = nullptr;  // [M, k]
  std::byte* experts = nullptr;
  std::int64_t experts_bytes = 0;
  std::byte* shared = nullptr;  // same memory as `experts`
  std::int64_t shared_bytes = 0;
  void* shared_rows = nullptr;  // [M, H] of shared_dtype, behind `shared`
  DType shared_dtype = DType::kBF16;

  static Result<LayerWorkspace> carve(const layer::FusedPlan& plan, bool gated_shared,
                                      std::int64_t tokens, Arena& arena);
};

class CudaLayer final : public layer::LayerEngine {
 public:
  // ok, or which stage cannot run on a GPU and why (kUnsupported); needs no device.
  static Status can_implement(const layer::FusedPlan& plan, const FusedMoE::Options& options);

  // Uploads everything; experts one at a time. Consumes weights.experts. kDevice, kOutOfMemory and
  // the source's errors, each with its stage in front.
  static Result<std::unique_ptr<layer::LayerEngine>> create(const layer::EngineParts& parts);
  ~CudaLayer() override;

  // Copies in, runs, waits, copies out. Buffers for the copies are made at the first call.
  Status forward_host(const FusedMoE::Args& args) const override;
  Status enqueue(Stream stream, const FusedMoE::Args& args) const override;
  Status sum_over_replicas(Stream stream, const TensorView& x) const override;
  Status health() const override;
  std::string rank_engine() const override;
  std::string_view experts_backend() const override;
  std::int64_t weight_bytes() const override;
  std::int64_t workspace_bytes() const override;
  std::string determinism() const override;
  layer::ExpertBalancer* balancer() const override;
  // Without a shared expert that has joined.
  Result<std::vector<ExpertPart>> expert_parts() const override;

 private:
  struct Impl;
  explicit CudaLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// --- The row of the catalogue ---

void append_sm90_candidates(layer::ExplainStage stage, const layer::FusedPlan& plan,
                            std::string_view router_name, Device device,
                            std::vector<CandidateReport>& rows);
std::string sm90_determinism(const layer::FusedPlan& plan);
Status explain_sm90_engine(const layer::FusedPlan& plan, const MoeLayerSpec& spec,
                           const FusedMoE::Options& options, LayerExplanation& explanation);
// CudaLayer::create; in a build without CUDA the refusal of check_device.
Result<std::unique_ptr<layer::LayerEngine>> make_sm90_engine(const layer::EngineParts& parts);

inline constexpr layer::LayerEngineRow kSm90Engine = {
    .name = "sm90",
    .serves = [](Device device) { return device.is_cuda(); },
    .slots_as_rows = false,
    .append_candidates = &append_sm90_candidates,
    .explain = &explain_sm90_engine,
    .create = &make_sm90_engine,
};

}  // namespace moesaic::cuda
