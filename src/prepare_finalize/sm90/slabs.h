// The rows of a batched prepare in device memory: where each slot's row lies, and its copy.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"
#include "permute/sm90/align.h"

namespace moesaic::cuda {

// What slot_rows says of a slot without a row: no expert here, or no room in its slab.
inline constexpr std::int32_t kNoSlabRow = -1, kNoRoom = -2;

// After launch_align with one record per expert (rows_per_record >= pairs).
struct FillSlabsParams {
  const void* x = nullptr;  // [tokens, columns], rows x_stride elements apart
  DType x_dtype = DType::kBF16;
  std::int64_t x_stride = 0, columns = 0;
  // [pairs] or null: a row is rounded to the slabs' dtype, then times its slot's weight, rounded too.
  const float* weights = nullptr;
  const std::int32_t* topk_ids = nullptr;    // [pairs]
  const std::int32_t* expert_map = nullptr;  // [num_experts] or null: identity
  std::int32_t pairs = 0, top_k = 1, num_experts = 0, num_local_experts = 0;
  // The list; not read without local experts.
  const GroupRecord* groups = nullptr;
  const std::uint32_t* num_groups = nullptr;
  const std::int32_t* row_of_pair = nullptr;
  std::int32_t slab_rows = 0;         // T
  std::int32_t* counts = nullptr;     // [num_local_experts] out, at most T
  std::int32_t* slot_rows = nullptr;  // [pairs] out: expert * T + place in the slab, or as above
  void* slabs = nullptr;              // [num_local_experts, T, columns] out, as far as counts say
  DType dtype = DType::kBF16;
};
// Capturable. Returns a cudaError_t value.
int launch_fill_slabs(const FillSlabsParams& params, void* stream);

// The way back: row s of `to` is the slab row of slot s, as its expert left it; zeros where there is none,
// NaN where it found no room.
struct SlotRowsParams {
  const void* slabs = nullptr;  // [num_local_experts * T, columns]
  DType slabs_dtype = DType::kF32;
  const std::int32_t* slot_rows = nullptr;  // [slots], see above
  std::int64_t slots = 0, columns = 0;
  void* to = nullptr;  // [slots, columns]
  DType dtype = DType::kF32;
};
int launch_slot_rows(const SlotRowsParams& params, void* stream);

}  // namespace moesaic::cuda
