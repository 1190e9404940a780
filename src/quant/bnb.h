// bitsandbytes: nf4 and fp4 codes with an absolute maximum per block, its nested ("double")
// quantisation, and int8 rows. Plain loops. Source: QLoRA (Dettmers et al. 2023) and the files that
// bitsandbytes writes.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Elements that share an absmax: any power of two in this range, the first of the defaults of
// writers below; and absolute maxima that share one of their own in the nested form.
inline constexpr std::int64_t kBnbMinBlockSize = 32, kBnbMaxBlockSize = 4096;
inline constexpr std::int64_t kBnbBlockSize = 64, kBnbNestedBlockSize = 256;  // writers' defaults

// Values of the sixteen codes of kNf4 or kFp4, in units of a block's absmax.
std::span<const float, 16> bnb_values(CodeTable table);
// Nearest entry of x = value / absmax; a value exactly between two entries takes the lower one
// (fp4: of the magnitudes, with the sign in bit 3; a negative zero is code 8). NaN gives the code
// of 0.
std::uint8_t bnb_encode(CodeTable table, float x);

// The tensor is one row of its elements in row-major order, cut into blocks that need not respect
// its rows; byte j holds code 2j in its *high* nibble and 2j + 1 in the low one.
//   x       any shape                       in, F32, BF16 or F16, finite
//   packed  [ceil(numel/2)]                 out, U8 (an odd last nibble is 0)
//   absmax  [ceil(numel/block_size)]        out, F32
// block_size: a power of two, 32 .. 4096. Errors: kInvalidArgument (block_size, NaN or infinite x),
// kInvalidShape, kInvalidDType, kInvalidLayout, kAliasing. Deterministic. Relative RMS error of nf4
// with blocks of 64 on normal data 0.092.
Status quantize_bnb4(ConstTensorView x, CodeTable table, std::int64_t block_size, TensorView packed,
                     TensorView absmax);
// Nested absmax: absmax[i] = map[code[i]] * nested_absmax[i / nested_block] + offset, in fp32 with
// two roundings.
//   codes [n] U8, map [256] F32, nested_absmax [ceil(n/nested_block)] F32 -> absmax [n] F32
Status expand_nested_absmax(ConstTensorView codes, ConstTensorView map,
                            ConstTensorView nested_absmax, std::int64_t nested_block, float offset,
                            TensorView absmax);

// Exchanges the nibbles of every byte, in place or not: the file's order to and from the library's
// (low nibble first). in, out U8 of one shape.
Status swap_nibbles(ConstTensorView in, TensorView out);

}  // namespace moesaic::quant
