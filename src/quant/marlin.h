// The order in which Marlin kernels read integer weights: tiles of 16 x 64, permuted so that each
// lane's values for a half-precision MMA lie together. Interoperability only, no kernel of this
// library reads it. K and N here are those of a linear, weight [N, K]; Marlin's own matrices are
// [K, N]. Source: Marlin (Frantar et al. 2024) and its use in vLLM.
#pragma once

#include <array>
#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// Place p of a chunk of 1024 values (4 tiles of 16 x 16, each row-major) holds value perm[p] of it.
// bits: 4 or 8.
std::array<std::int16_t, 1024> marlin_permutation(int bits);
// The same for a row of scales: 64 columns (groups along K), 32 (one scale per channel).
std::array<std::int16_t, 64> marlin_group_scale_permutation();
std::array<std::int16_t, 32> marlin_channel_scale_permutation();

// codes U8 [N, K] <-> packed I32 [K/16, N*16*bits/32], value i of a word in bits bits*i.
// kInvalidShape unless K % 16 == 0 and N % 64 == 0; kInvalidArgument for bits other than 4 or 8 or
// a code that does not fit (naming row and column). Also dtypes, layout, aliasing. Each undoes the
// other.
Status pack_marlin_weight(ConstTensorView codes, int bits, TensorView packed);
Status unpack_marlin_weight(ConstTensorView packed, int bits, TensorView codes);

// Rows of scales (or of a bias, as [1, N]): [G, N], elements of 2 or 4 bytes, to Marlin's order and
// back. grouped: there is more than one group along K (64 columns at a time), else 32.
// kInvalidShape unless N is a multiple of that.
Status to_marlin_scales(ConstTensorView scales, bool grouped, TensorView out);
Status from_marlin_scales(ConstTensorView scales, bool grouped, TensorView out);

// zeros U8 [N, G] <-> packed I32 [G, N*bits/32]: the grouped scale order, then the interleave of a
// word's values. N % 64 == 0.
Status pack_marlin_zeros(ConstTensorView zeros, int bits, TensorView packed);
Status unpack_marlin_zeros(ConstTensorView packed, int bits, TensorView zeros);

}  // namespace moesaic
