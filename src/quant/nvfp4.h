// NVFP4: e2m1 elements, an e4m3 scale per 16 of a row, and one fp32 scale per tensor (weights: per
// expert matrix). Plain loops, the oracle of the kernels' own quantisers.
//
// Two reciprocal numbers describe the fp32 level. The *global scale* s2 is a dequantisation
// multiplier like every scale of this library; the *quantisation multiplier* gscale = 1 / s2 is
// what kernels take and what compressed-tensors calls weight_global_scale. value = e2m1 * e4m3 *
// s2.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

inline constexpr std::int64_t kNvfp4GroupSize = 16;

// gscale of a tensor with this amax: 2688 / amax = 6 * 448 / amax, at most 2^100 (which keeps every
// product finite); 1 for a tensor of zeros.
float nvfp4_quant_multiplier(float amax);

// The block scale byte: e4m3(gscale * (amax / 6)), saturating at 448 when gscale was calibrated too
// large. Non-negative.
std::uint8_t nvfp4_block_scale(float amax, float gscale);

// One row, with no checks; k % 16 == 0.
//   q      k/2 bytes, the even element in the low nibble
//   scale  k/16 bytes of e4m3
// code = e2m1(x * (gscale / sf)), saturating at 6; a block scale of 0 makes the block zeros. NaN
// elements do not count in amax.
void ref_quantize_nvfp4_row(const float* x, std::int64_t k, float gscale, std::uint8_t* q,
                            std::uint8_t* scale);

//   x      [.., K]     in, F32, BF16 or F16, finite, K % 16 == 0
//   q      [.., K]     out, F4 (shape counts elements)
//   scale  [.., K/16]  out, F8_E4M3
// All contiguous and disjoint. Errors: kInvalidArgument (gscale not finite and positive; NaN or
// infinite x, naming row and column), kInvalidShape, kInvalidDType, kInvalidLayout, kAliasing.
// Deterministic; a block depends on its own elements and gscale only. Relative RMS error on normal
// data about 0.095.
Status quantize_nvfp4(ConstTensorView x, float gscale, TensorView q, TensorView scale);

// out = (e2m1(q) * e4m3(scale)) * global_scale in fp32 (the first product is exact), rounded once
// to out's dtype. A NaN or negative block scale is kInvalidArgument naming row and block.
Status dequantize_nvfp4(ConstTensorView q, ConstTensorView scale, float global_scale,
                        TensorView out);

}  // namespace moesaic::quant
