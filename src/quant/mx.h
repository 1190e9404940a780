// OCP microscaling formats MXFP8 (e4m3) and MXFP4 (e2m1): 32 elements of a row share an E8M0 scale.
// Plain loops, the oracle of the kernels' own quantisers. The three rules that choose a scale are
// in numerics/e8m0.h and are never mixed: a caller names one. Source: OCP MX v1.0 for the format.
#pragma once

#include <cstdint>

#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

inline constexpr std::int64_t kMxGroupSize = 32;

// `element` below is F8_E4M3 or F4.
// The scale byte of a group with this amax. kCeil: nothing saturates (MXFP8, weights of MXFP4);
// kRound175: activations of MXFP4, compressed-tensors; kOcpFloor: OCP, llama.cpp.
std::uint8_t mx_scale(float amax, DType element, ExponentRule rule);

// One row, with no checks; k % 32 == 0.
//   q      k bytes of e4m3, or k/2 bytes of e2m1, the even element in the low nibble
//   scale  k/32 bytes; stride in bytes between groups
// q = element(x / 2^(scale - 127)), saturating; the quotient is exact. Byte 0 makes the whole group
// zeros: consumers may read it as 0.0. NaN elements do not count in amax.
void ref_quantize_mx_row(const float* x, std::int64_t k, DType element, ExponentRule rule,
                         std::uint8_t* q, std::uint8_t* scale, std::int64_t scale_stride = 1);

// The element is that of q's dtype.
//   x      [.., K]     in, F32, BF16 or F16, K % 32 == 0
//   q      [.., K]     out, F8_E4M3 or F4 (shape counts elements)
//   scale  [.., K/32]  out, F8_E8M0 or U8
// All contiguous and disjoint. Errors: kInvalidArgument (NaN or infinite x, naming row
// and column), kInvalidShape (names K), kInvalidDType, kInvalidLayout, kAliasing. Deterministic; a
// group depends on its own elements only. Relative RMS error on normal data: MXFP8 0.0266
// (OCP-floor 0.0292); MXFP4 0.1154 CEIL, 0.1149 OCP-floor, 0.1119 ROUND@1.75.
Status quantize_mx(ConstTensorView x, ExponentRule rule, TensorView q, TensorView scale);

// out = element(q) * 2^(scale - 127), exact in fp32 except below its subnormals, rounded once to
// out's dtype (F32, BF16 or F16). A NaN scale (byte 0xFF) or code is kInvalidArgument naming row
// and group.
Status dequantize_mx(ConstTensorView q, ConstTensorView scale, TensorView out);

}  // namespace moesaic::quant
