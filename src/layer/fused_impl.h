// What a FusedMoE holds, and the steps of its forward call.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "core/arena.h"
#include "layer/expert_balancer.h"
#include "layer/fused_plan.h"
#include "layer/rank_mesh.h"
#include "layer/sm90/layer.h"
#include "moesaic/fused_moe.h"
#include "moesaic/gate.h"
#include "moesaic/modular_kernel.h"

namespace moesaic {

// dst[0 .. n) += weight * src[0 .. n), as the experts backend does it.
using AccumulateRowFn = void (*)(const float* src, float weight, std::int64_t n, float* dst);

struct FusedMoE::Impl {
  MoeLayerSpec spec;
  FusedPlan plan;
  Options options;
  std::optional<GateLinear> gate;
  std::optional<Router> router;
  std::optional<ModularKernel> kernel;
  std::optional<ModularKernel> shared;
  std::optional<GateLinear> shared_gate;
  Tensor experts_norm_weight;             // [H] F32; plan.input_norm_eps > 0
  std::unique_ptr<cuda::CudaLayer> cuda;  // instead of all the stages above, on a GPU
  std::string router_name;
  std::unique_ptr<RankMesh> mesh;  // null: this layer does not communicate
  std::unique_ptr<ExpertBalancer> balancer;
  AccumulateRowFn accumulate = nullptr;  // per-slot reduction
  std::int64_t small_bytes = 0;          // gate and shared gate weights
  Tensor workspace;
  mutable std::mutex mutex;  // one call at a time uses the workspace

  // Buffers of one chunk of at most max_tokens rows.
  struct Buffers {
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
    float* slot_ones = nullptr;       // [C * k]
    float* slot_output = nullptr;     // [C * k, latent]
  };
  // Rows of a chunk with their routing: what the kernel is given.
  struct RoutedRows {
    ConstTensorView x;                  // [n, H]
    const float* weights = nullptr;     // [n, k]
    const std::int32_t* ids = nullptr;  // [n, k]
  };
  // Where combine finds the parts of row t of the chunk: row t - routed_first of the routed result,
  // t - shared_first of the shared one.
  struct CombineRows {
    RowRange rows;
    std::int64_t routed_first = 0, shared_first = 0;
  };

  static Result<std::unique_ptr<Impl>> build(MoeLayerWeights weights, const Options& options);
  // The stages of a CPU layer and their workspace.
  Status build_stages(MoeLayerWeights& weights);
  Status build_routed(ExpertSource& source);
  Status build_shared(const MoeLayerTensors& tensors);
  // What all ranks must have in common.
  std::int64_t fingerprint() const;

  std::int64_t logit_columns() const {
    return spec.routing.num_experts + spec.routing.num_zero_experts;
  }
  // The routed experts may round straight into the caller's output when nothing is added to or
  // multiplied with their result.
  bool writes_output_directly() const {
    return !plan.has_shared && !plan.has_zero_experts && !options.routed_output_transform &&
           plan.output_scale == 1.0F && plan.ranks.reduced && !plan.ranks.per_slot;
  }
  Result<Buffers> carve(Arena& arena, std::int64_t rows) const;
  Status check(const ConstTensorView& x, const TensorView& output, const Trace& trace) const;
  Status forward_chunk(const ConstTensorView& x, const TensorView& output,
                       const Trace& trace) const;
  // The same over ranks (fused_ranks.cc).
  Status forward_chunk_over_ranks(const ConstTensorView& x, const TensorView& output,
                                  const Buffers& b) const;
  Status route(const ConstTensorView& x, const Buffers& b, const Trace& trace) const;
  Status run_routed(const RoutedRows& rows, const Buffers& b, const TensorView& output,
                    std::span<RowNumerics> numerics = {}) const;
  Status run_slots(const ConstTensorView& input, const RoutedRows& rows, const Buffers& b) const;
  // Adds to `numerics`, where it is asked for.
  Status run_shared(const ConstTensorView& x, const Buffers& b,
                    std::span<RowNumerics> numerics = {}) const;
  void combine(const CombineRows& c, const Buffers& b, const TensorView& output) const;
};

inline TensorView view_of(void* data, DType dtype, const Shape& shape) {
  return {static_cast<std::byte*>(data), dtype, shape};
}
inline ConstTensorView view_of(const void* data, DType dtype, const Shape& shape) {
  return {static_cast<const std::byte*>(data), dtype, shape};
}

// Rows [first, first + count) of a matrix whose rows may be apart.
template <class Byte>
BasicTensorView<Byte> rows_of(const BasicTensorView<Byte>& t, std::int64_t first,
                              std::int64_t count) {
  BasicTensorView<Byte> part = t;
  if (t.present()) part.data += first * t.strides[0] * (dtype_bits(t.dtype) / 8);
  part.shape = Shape{count, t.dim(1)};
  return part;
}

}  // namespace moesaic
