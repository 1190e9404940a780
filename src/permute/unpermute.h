// From expert rows back to tokens.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "permute/contiguous_permute.h"

namespace moesaic {

// out[t] = sum over local slots j of weights[t, j] * y[inv_perm[t, j]], in slot order j = 0 .. k-1,
// accumulated in fp32 and rounded once. A token without a local slot gets a row of zeros. Whether a
// slot is local is decided by its id before inv_perm is read, so entries of other slots may hold
// anything.
//   y         [R, H]  in, F32, BF16 or F16, contiguous
//   weights   [M*k]   in, or empty: all 1 (the weight was applied to the input)
//   inv_perm  [M*k]   in, from plan_contiguous_permutation or moe_permute
//   out       [M, H]  out, F32, BF16 or F16, contiguous, no overlap with y
// Error before the final rounding: at most (k + 1) * 2^-24 * sum |w y|. Bits do not depend on the
// other tokens or on R. Errors: as SlotRouting; kInvalidArgument (inv_perm of a local slot outside
// [0, R), naming token and slot), kInvalidShape, kInvalidDType, kInvalidLayout, kAliasing.
// O(M k H).
Status unpermute_and_reduce(const SlotRouting& routing, ConstTensorView y,
                            std::span<const float> weights, std::span<const std::int32_t> inv_perm,
                            TensorView out);

}  // namespace moesaic
