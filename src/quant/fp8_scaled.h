// FP8 (e4m3) with one scale per tensor or per row (activations: per token; weights: per output
// channel), static or dynamic, as plain loops: the oracle of the kernels' own quantisers. Blocks
// and groups: fp8_block.h, fp8_group.h. Source: per-tensor and per-token FP8 of vLLM checkpoints.
#pragma once

#include <cstdint>
#include <limits>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Smallest scale of a row, bits 0x36924925: rows of zeros and of tiny numbers keep a finite
// 1/scale.
inline constexpr float kFp8RowMinScale = 1.0F / (448.0F * 512.0F);

// Scale of a row with this amax: max(min(amax, upper_bound) / 448, kFp8RowMinScale).
float fp8_row_scale(float amax, float upper_bound = std::numeric_limits<float>::infinity());

// One row, with no checks: q[i] = e4m3(x[i] / s), saturating, with s = fp8_row_scale(amax), which
// is returned. A NaN element does not count in amax and gets the code of +448.
float ref_quantize_fp8_token(const float* x, std::int64_t k, std::uint8_t* q);
// q[i] = e4m3(x[i] * (1 / scale)), the reciprocal rounded to fp32 once; saturates.
void ref_quantize_fp8_static(const float* x, std::int64_t count, float scale, std::uint8_t* q);

// In all of these
//   x    any rank   in, F32, BF16 or F16
//   q    as x       out, F8_E4M3
// and all tensors are contiguous and disjoint. Errors: kInvalidArgument (a scale that is not finite
// and positive; a NaN or infinite weight where "finite" is said), kInvalidDType, kInvalidShape,
// kInvalidLayout, kAliasing. Deterministic. Relative RMS error on normal data about 0.026.

// Static per tensor: one given scale.
Status quantize_fp8_static(ConstTensorView x, float scale, TensorView q);
// Dynamic per tensor: scale [1] F32 = amax / 448, however small; a tensor of zeros gets the scale 0
// and codes 0, so that products are 0 and never NaN. x finite.
Status quantize_fp8_tensor(ConstTensorView x, TensorView q, TensorView scale);
// One scale per row of x [.., M, K]: scale [.., M] F32, as ref_quantize_fp8_token.
Status quantize_fp8_rows(ConstTensorView x, TensorView q, TensorView scale);

// out = value(q) * scale, the product in fp32, rounded once to the output's dtype.
//   q      [.., N, K]  in, F8_E4M3 or I8 (the same two granularities of int8)
//   scale  [1] or [.., N]  in, F32
//   out    as q        out, F32, BF16 or F16
Status dequantize_scaled(ConstTensorView q, ConstTensorView scale, TensorView out);

// Brings codes from one scale to another, in place: q = e4m3(value(q) * from / to), in fp32 (the
// original rounds the product to f16 in between, which moves codes near ties). Equal scales leave
// every byte as it is. Used to give both halves of w13 the larger of their two scales.
//   codes  any shape, F8_E4M3, in and out
// kInvalidArgument unless both scales are finite and positive.
Status requantize_fp8(TensorView codes, float from, float to);

}  // namespace moesaic::quant
