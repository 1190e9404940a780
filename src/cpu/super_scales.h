// Scales of integer weights in super-blocks (OperandQuant::super_bits) as the CPU backends hold them: as
// integers, as the k types of GGUF files do, and not as the F32 products.
//
// A panel's super-blocks of 256 steps follow each other. One is, [64] by column of the panel each:
//   F16 d               the number that the scales are multiples of
//   F16 dmin            the minima's, with minima
//   planes of scales    super_bits 8: a byte (two's complement) per group of 16 or 32 steps;
//                       6: three bytes per four groups. Byte j has the integer of group j in its low
//                       six bits and bits 2 j and 2 j + 1 of that of group 3 in the others
//   planes of minima    the same, with minima
// A super-block that K ends in has all its planes. Padding columns and groups are 0.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/packed_weights.h"

namespace moesaic::cpu {

// Scales (F32, BF16 or F16) and minima (F32) of a matrix, [rows, ceil(K / group)] contiguous, into the
// above, [panel][panel_bytes]. Parallel over panels. The index of the first super-block, row by row, whose
// numbers have no such form (scales or minima), or -1; then dst is not to be used.
std::int64_t pack_super_scales(const PackedShape& shape, const SuperScaleForm& form,
                               const ConstTensorView& scale, const ConstTensorView& min,
                               std::byte* dst, int num_threads);

}  // namespace moesaic::cpu
