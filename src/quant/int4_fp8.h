// int4 weights for FP8 tensor cores (W4A8): a group scale of 128 columns is split into an e4m3 byte
// and an fp32 channel scale, and a weight means the *e4m3-rounded* product of its code and the
// byte. Plain loops, the oracle of faster code; the word encodings of the kernel's look-up are here
// too. Source: the mixed-input grouped GEMM for Hopper in CUTLASS, and its weight preparation in
// vLLM.
#pragma once

#include <array>
#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

inline constexpr std::int64_t kInt4Fp8GroupSize = 128;

// Two-level scales of each row n:
//   chan0 = max(max_g group_scale / 448, 1 / (448 * 512)),  f = e4m3(group_scale / chan0),
//   scale = e4m3(f / 8),  channel_scale = 8 * chan0.
// The division by 8 keeps every product of a code -8 .. 7 with the byte inside e4m3; it costs
// mantissa bits where a group's scale is below about 1/3584 of the row's largest.
//   group_scale    [N, G]  in, F32, BF16 or F16, positive and finite
//   scale          [N, G]  out, F8_E4M3
//   channel_scale  [N]     out, F32
// Errors: kInvalidArgument (a scale out of range, naming row and group), shapes, dtypes, layout,
// aliasing. scale * channel_scale is within 6.3 % of group_scale outside the small groups above.
Status split_int4_fp8_scales(ConstTensorView group_scale, TensorView scale,
                             TensorView channel_scale);

// The eight products of a scale with -8, -7 .. -1 as e4m3 bytes, in that order.
std::array<std::uint8_t, 8> int4_fp8_table(std::uint8_t scale);

// out = int4_fp8_value(q, scale of its group) * channel_scale (code_values.h), rounded once to
// out's dtype.
//   codes          [N, K]       in, I8 in [-8, 7] (kInvalidArgument otherwise)
//   scale          [N, K/128]   in, F8_E4M3;  channel_scale [N] in, F32
//   out            [N, K]       out, F32, BF16 or F16
// The last group may be partial (then ceil(K/128) scales). Relative RMS error of the whole chain
// (symmetric int4 of group 128, then this) on normal data 0.1147.
Status dequantize_int4_fp8(ConstTensorView codes, ConstTensorView scale,
                           ConstTensorView channel_scale, TensorView out);

// Eight nibbles of a word, all at once: stored v + 8 (uint4b8) to two's complement and back.
constexpr std::uint32_t int4_from_uint4b8(std::uint32_t word) { return word ^ 0x88888888U; }

// "Unified" encoding of eight two's complement nibbles: 1 .. 7 become 7 .. 1, zero and negatives
// stay. The low three bits then index int4_fp8_table (0 -> magnitude 8 .. 7 -> 1) and bit 3 says
// negative; 0000 means 0. Its own inverse.
std::uint32_t unified_encode(std::uint32_t word);

}  // namespace moesaic::quant
