// int4 weights for FP8 tensor cores (W4A8): a group scale (of 128 columns, in files also of other
// multiples of 32) is split into an e4m3 byte
// and an fp32 channel scale, and a weight means the *e4m3-rounded* product of its code and the
// byte (int4_fp8_value in code_values.h). Source: the mixed-input grouped GEMM for Hopper in CUTLASS,
// and its weight preparation in vLLM.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

inline constexpr std::int64_t kInt4Fp8GroupSize = 128;  // of the scheme's name
inline constexpr std::int64_t kInt4Fp8GroupUnit = 32;   // a group is a multiple of it

// Two-level scales of each row n:
//   chan0 = max(max_g group_scale / 448, 1 / (448 * 512)),  f = e4m3(group_scale / chan0),
//   scale = e4m3(f / 8),  channel_scale = 8 * chan0.
// Rows whose largest group_scale is below 8 / (448 * 512) (weights up to 2.6e-4) have no such floor:
// it would leave their scales fewer bits, down to none.
// The division by 8 keeps every product of a code -8 .. 7 with the byte inside e4m3; it costs
// mantissa bits where a group's scale is below about 1/3584 of the row's largest.
//   group_scale    [N, G]  in, F32, BF16 or F16, finite and not negative
//   scale          [N, G]  out, F8_E4M3
//   channel_scale  [N]     out, F32
// Errors: kInvalidArgument (a scale that is not finite, naming row and group), kUnsupported (a
// negative one), shapes, dtypes, layout, aliasing. scale * channel_scale is within 6.3 % of
// group_scale outside the small groups above.
Status split_int4_fp8_scales(ConstTensorView group_scale, TensorView scale,
                             TensorView channel_scale);

}  // namespace moesaic::quant
