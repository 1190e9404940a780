// Integer codes in 32-bit words, as weight-only checkpoints store them, to one code per
// byte; what conversion writes, also from it. Codes are what is stored: no bias or zero point is applied to weights here. Quantising and
// dequantising: int_group.h.
//
// Four orders occur; N = output rows, K = input columns of the weight, G = groups along K:
//   GPTQ weight      [ceil(K*bits/32), N]  code k of column n in the words of that column, densely
//   GPTQ zeros       [G, ceil(N*bits/32)]  code n of row g in the words of that row, densely
//   AWQ weight       [K, N/8], zeros [G, N/8]: nibble i of word j is column
//                    8j + (0,2,4,6,1,3,5,7)[i]
//   compressed-tensors "pack-quantized" weight [N, ceil(K*bits/32)], zeros [ceil(N*bits/32), G],
//                    densely
// "Densely": element i occupies bits i*bits .. of the little-endian bit stream of the line, so that
// widths which do not divide 32 cross words. Unused bits of the last word are 0 when written and
// ignored when read.
//
// All tensors are contiguous; words are I32 (or U32), codes U8 [N, K], zeros U8 [N, G]. Errors of
// every function: kInvalidArgument (bits), kInvalidDType, kInvalidShape, kInvalidLayout, kAliasing.
// pack_ct_weight refuses a code that does not fit (kInvalidArgument, naming its row and column).
// Source: AutoGPTQ, AutoAWQ and compressed-tensors file formats.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Words that hold `count` codes of `bits` bits, densely.
constexpr std::int64_t words_for_codes(std::int64_t count, int bits) {
  // Written so that it cannot overflow: 32 codes fill `bits` words.
  return count / 32 * bits + (count % 32 * bits + 31) / 32;
}

// bits: 2, 3, 4 or 8.
Status unpack_gptq_weight(ConstTensorView qweight, int bits, TensorView codes);

// How a GPTQ file stores the zero point z: its checkpoint_format "gptq" stores z - 1 (so a
// symmetric 4-bit file, z = 8, has words 0x77777777), "gptq_v2" stores z.
enum class GptqZeroFormat : std::uint8_t { kMinusOne, kPlain };
// zeros gets z itself; with kMinusOne that is 1 .. 2^bits, so it may exceed the largest code by one
// (for 8 bits the stored 255 is refused: 256 does not fit a byte).
Status unpack_gptq_zeros(ConstTensorView qzeros, int bits, GptqZeroFormat format, TensorView zeros);

// 4 bits; N must be a multiple of 8. Zeros are stored as they are.
Status unpack_awq_weight(ConstTensorView qweight, TensorView codes);
Status unpack_awq_zeros(ConstTensorView qzeros, TensorView zeros);

// bits: 1 .. 8. Stored codes are value + 2^(bits-1), in weights and zeros alike.
Status unpack_ct_weight(ConstTensorView packed, int bits, TensorView codes);
Status pack_ct_weight(ConstTensorView codes, int bits, TensorView packed);
Status unpack_ct_zeros(ConstTensorView packed, int bits, TensorView zeros);

// Codes as the CPU backends hold them. 4 bits: two per byte, the even column in the low nibble, of
// (code - bias) mod 16: bias 8 turns stored uint4b8 into two's complement, 0 keeps unsigned codes.
//   codes    [.., K], K even: U8 of 0 .. 15, or I8 of -8 .. 7 (then bias must be 0)
//   nibbles  [.., K/2] U8, or [.., K] I4 or U4
// kInvalidArgument for a code outside or another bias, kInvalidShape for an odd K.
Status pack_nibbles(ConstTensorView codes, int bias, TensorView nibbles);
// 8 bits: I8 out = code - bias (128 for stored uint8b128), element by element; may work in place.
// codes U8, values I8 of the same shape. kInvalidArgument for a difference outside int8.
Status subtract_bias(ConstTensorView codes, int bias, TensorView values);

}  // namespace moesaic::quant
