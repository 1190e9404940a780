// What finalize still has to do with the experts' output: the TopKWeightAndReduce variants. All sum
// in fp32 in slot order j = 0 .. k-1 and round once to the output dtype, so the result does not
// depend on batch size or threads. None writes to its input. Slots with id -1 or a remote expert
// are skipped before their rows are looked at: such rows may be undefined. Error vs exact sum: <=
// (k + 1) * 2^-24 * sum |w * row| before the final rounding.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::prepare_finalize {

// Weights and locality of all slots of M tokens.
struct SlotWeights {
  const float* weights = nullptr;            // [M, k]
  const std::int32_t* ids = nullptr;         // [M, k] global
  std::span<const std::int32_t> expert_map;  // empty: identity
  std::int64_t top_k = 0;
  bool weight_on_input = false;  // weights count as 1
};

// kNoOp: copies [M, H] to [M, H], converting the dtype if they differ; nothing to do when both are
// the same storage. kInvalidShape.
Status reduce_no_op(const TensorView& output, const ConstTensorView& expert_output);

// kContiguous: expert_output is [M*k, H] or [M, k, H].
Status reduce_contiguous(const TensorView& output, const ConstTensorView& expert_output,
                         const SlotWeights& slots);

// kNaiveBatched: expert_output is [E_l, T, H]; slot_rows[M*k] is the row of each slot inside its
// expert's slab, unread for slots without a local expert.
Status reduce_naive_batched(const TensorView& output, const ConstTensorView& expert_output,
                            const SlotWeights& slots, std::span<const std::int32_t> slot_rows);

}  // namespace moesaic::prepare_finalize
