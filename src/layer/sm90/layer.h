// The layer on one Hopper GPU: gate, router, experts, shared experts and their sum on one stream.
// FusedMoE owns one when its device is a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "core/arena.h"
#include "layer/fused_plan.h"
#include "moesaic/checkpoint.h"
#include "moesaic/device.h"
#include "moesaic/fused_moe.h"

namespace moesaic {
class RankMesh;  // rank_mesh.h
}

namespace moesaic::cuda {

// A shared expert that looks like a routed one (same sizes, scheme and activation, always weight 1)
// joins the routed experts as one more, chosen by every token in its last slot: its weights come in
// the same stream of copies and its row is added last, as it is apart from them. Above
// kJoinedTokens rows the gain is gone and the rows of an extra slot are not worth their memory: the
// two are then run one after the other on the same weights. The bits are the same.
inline constexpr std::int64_t kJoinedTokens = 4096;
bool shared_joins(const FusedPlan& plan, bool gated_shared);
// What the experts object is made for: the routed experts, and the shared one when it joins.
MoeProblem experts_problem(const FusedPlan& plan, bool gated_shared);

// The workspace of one call, all pieces 256-byte aligned; pointers are null while measuring. The
// shared experts run before the routed ones (their rows then lie in the output) or after them,
// never at the same time: both use the same memory. Over ranks the experts see the rows of others.
struct LayerWorkspace {
  float* logits = nullptr;        // [M, E + zero experts]
  float* topk_weights = nullptr;  // [M, k], or [M, k + 1] with a joined expert
  std::int32_t* topk_ids = nullptr;
  float* zero_weight = nullptr;     // [M], with zero experts
  float* shared_logits = nullptr;   // [M], gated shared experts ...
  float* shared_weights = nullptr;  // [M]
  std::int32_t* shared_ids = nullptr;
  float* routed = nullptr;  // [M, H], when something is multiplied with or added to the result
  std::int32_t* sent_ids = nullptr;  // [M, k], over ranks with zero experts: without their slots
  std::byte* experts = nullptr;
  std::int64_t experts_bytes = 0;
  std::byte* shared = nullptr;  // same memory as `experts`
  std::int64_t shared_bytes = 0;
  std::uint16_t* shared_rows = nullptr;  // [M, H] behind `shared`

  static Result<LayerWorkspace> carve(const FusedPlan& plan, bool gated_shared, std::int64_t tokens,
                                      Arena& arena);
};

class CudaLayer {
 public:
  // ok, or which stage cannot run on a GPU and why (kUnsupported); needs no device.
  static Status can_implement(const FusedPlan& plan, const FusedMoE::Options& options);

  // Uploads everything; experts one at a time. Consumes weights.experts. kDevice, kOutOfMemory and
  // the source's errors, each with its stage in front.
  //   mesh  of an active rank plan, outlives the layer's calls; else null
  static Result<std::unique_ptr<CudaLayer>> create(const MoeLayerSpec& spec, const FusedPlan& plan,
                                                   const FusedMoE::Options& options,
                                                   MoeLayerWeights& weights, const RankMesh* mesh);
  ~CudaLayer();
  CudaLayer(const CudaLayer&) = delete;
  CudaLayer& operator=(const CudaLayer&) = delete;

  // As FusedMoE::enqueue.
  Status enqueue(Stream stream, const ConstTensorView& hidden_states, const TensorView& output,
                 const FusedMoE::Trace& trace) const;
  // Host tensors, checked by the caller, at most max_tokens rows: copies in, runs, waits, copies
  // out. Buffers for the copies are made at the first call. Not from several threads at a time.
  Status forward_chunk(const ConstTensorView& hidden_states, const TensorView& output,
                       const FusedMoE::Trace& trace) const;

  std::int64_t weight_bytes() const;
  std::int64_t workspace_bytes() const;

 private:
  struct Impl;
  explicit CudaLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
