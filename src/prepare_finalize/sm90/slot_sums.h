// TopKWeightAndReduce::kContiguous and kNaiveBatched in device memory.
#pragma once

#include <cstdint>

#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// As prepare_finalize::reduce_contiguous, with its bits, on args.stream: expert_output [M*k, H] or
// [M, k, H]. Ids out of range are no expert. All but args.workspace is memory of problem.device:
// kInvalidArgument, kInvalidShape, kInvalidLayout before the launch; kDevice. Capturable. A build
// without CUDA: the refusal of check_device.
// slot_rows: as prepare_finalize::reduce_naive_batched instead, expert_output [E_l, T, H] and the
// row of each slot among all rows of the slabs, [M k] (slabs.h); a slot whose row found no room
// makes its token's sums NaN.
Status reduce_slots(const MoeProblem& problem, const FinalizeArgs& args,
                    const std::int32_t* slot_rows = nullptr);

struct SlotSumsParams {
  const void* rows = nullptr;  // [tokens * top_k, hidden]; rows of slots without an expert: unread
  DType rows_dtype = DType::kF32;
  const float* weights = nullptr;            // [tokens, top_k], or null: 1
  const std::int32_t* ids = nullptr;         // [tokens, top_k]
  const std::int32_t* expert_map = nullptr;  // [experts], negative: elsewhere; null: identity
  std::int64_t tokens = 0, hidden = 0;
  const std::int32_t* slot_rows = nullptr;  // [tokens, top_k], in the place of ids; or null
  std::int32_t top_k = 1, experts = 0;
  void* output = nullptr;  // [tokens, hidden]
  DType dtype = DType::kF32;
};
// Returns a cudaError_t value.
int launch_slot_sums(const SlotSumsParams& params, void* stream);

}  // namespace moesaic::cuda
