// FP8 (e4m3) weights with one scale per tensor or per row (output channel), as plain loops, and the
// scale of a row of activations (token). Blocks and groups: fp8_block.h, fp8_group.h. Source:
// per-tensor and per-token FP8 of vLLM checkpoints.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Smallest scale of a token, bits 0x36924925: rows of zeros and of tiny numbers keep a finite
// 1/scale. Rows of weights below it have none (fp8_weight_scale.h).
inline constexpr float kFp8RowMinScale = 1.0F / (448.0F * 512.0F);

// Scale of a token with this amax: max(amax / 448, kFp8RowMinScale).
float fp8_row_scale(float amax);

// In all of these
//   x    any rank   in, F32, BF16 or F16
//   q    as x       out, F8_E4M3
// and all tensors are contiguous and disjoint. Errors: kInvalidArgument (a NaN or
// infinite weight where "finite" is said), kInvalidDType, kInvalidShape,
// kInvalidLayout, kAliasing. Deterministic. Relative RMS error on normal data about 0.026.

// Dynamic per tensor: scale [1] F32 = amax / 448, however small; a tensor of zeros gets the scale 0
// and codes 0, so that products are 0 and never NaN. x finite.
Status quantize_fp8_tensor(ConstTensorView x, TensorView q, TensorView scale);
// One scale per row of x [.., M, K]: q = e4m3(x / s), saturating; scale [.., M] F32 = s =
// fp8_weight_scale(amax, kFp8RowMinScale) of fp8_weight_scale.h. A NaN element does not count in
// amax and gets the code of +448.
Status quantize_fp8_rows(ConstTensorView x, TensorView q, TensorView scale);

// out = value(q) * scale, the product in fp32, rounded once to the output's dtype.
//   q      [.., N, K]  in, F8_E4M3 or I8 (the same two granularities of int8)
//   scale  [1] or [.., N]  in, F32
//   out    as q        out, F32, BF16 or F16
Status dequantize_scaled(ConstTensorView q, ConstTensorView scale, TensorView out);

}  // namespace moesaic::quant
