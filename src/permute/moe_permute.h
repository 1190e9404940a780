// Rows copied by expert without padding: the layout of grouped GEMMs that take per-expert offsets.
// Source: the moe_permute step of CUTLASS-style fused MoE kernels.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "permute/contiguous_permute.h"

namespace moesaic {

// Sorts the slots stably by local expert, remote slots last, and copies the local ones' rows.
//   a                          [M, C]    in, any dtype with whole bytes per row, contiguous
//   expert_first_token_offset  [E_l+1]   out, first row of each expert; the last entry is the
//   number
//                                        of local rows
//   sorted_slots               [M*k]     out, flat slot of each row
//   inv_permuted_idx           [M*k]     out, row of each slot; >= offset[E_l] for remote slots
//   permuted                   [M*k, C]  out, same dtype, contiguous; rows >= offset[E_l] are not
//                                        written
// Errors: as SlotRouting (kInvalidArgument), kInvalidShape, kInvalidDType, kInvalidLayout,
// kAliasing. Deterministic. O(M k C).
Status moe_permute(const SlotRouting& routing, ConstTensorView a,
                   std::span<std::int64_t> expert_first_token_offset,
                   std::span<std::int32_t> sorted_slots, std::span<std::int32_t> inv_permuted_idx,
                   TensorView permuted);

}  // namespace moesaic
