// Integer weights and activations with one scale per group of columns (or per row), symmetric or
// with zero points: int8 per token and channel, int4, uint4 and int8 weight-only. Plain loops, the
// oracle of faster code. Codes are one per byte here; packed orders: int_packing.h.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Columns that share a scale in the schemes whose names end in -g128: what writers of weight-only
// checkpoints use unless they are told otherwise.
inline constexpr std::int64_t kIntGroupSize = 128;

// How a symmetric scale follows from a group's amax.
enum class IntScaleRule : std::uint8_t {
  kLargestCode,  // amax / (2^(bits-1) - 1): +-amax are codes; -2^(bits-1) is not used
  kBothEnds,     // max(largest / (2^(bits-1) - 1), -smallest / 2^(bits-1)): both ends are codes
  kFullRange,    // amax / ((2^bits - 1) / 2): finer steps, +amax may clip to the largest code.
                 // compressed-tensors
};

struct IntGroupFormat {
  int bits = 8;                                    // 2 .. 8
  std::int64_t group = -1;                         // columns that share a scale; -1: the whole row
  IntScaleRule rule = IntScaleRule::kLargestCode;  // not used with zero points
};

// Scale of int8 rows: amax / 127; 1 for a row of zeros (any would do; 1 is a valid scale in files).
float int8_row_scale(float amax);

// Symmetric: q = clamp(RNE(x / s), -2^(bits-1), 2^(bits-1) - 1), where s has been rounded to the
// dtype of `scale`, in which it will be read back.
//   x      [N, K]               in, F32, BF16 or F16, finite
//   codes  [N, K]               out, I8
//   scale  [N, ceil(K/group)]   out, F32, BF16 or F16 (f16: a scale above 65504 is refused)
// The last group may be partial. All contiguous and disjoint. Errors: kInvalidArgument (bits,
// group, NaN or infinite x, an unrepresentable scale), kInvalidShape, kInvalidDType,
// kInvalidLayout, kAliasing. Deterministic; a group depends on its own elements only. Relative RMS
// error on normal data: 4 bits 0.092 (group 32) .. 0.111 (128), 8 bits 0.0064 (128) .. 0.0078
// (1024).
Status quantize_int_group(ConstTensorView x, const IntGroupFormat& format, TensorView codes,
                          TensorView scale);

// The scales with which signed codes come closest to x: <x, q> / <q, q> of each group, rounded to
// the dtype of `scale`. Where that is not above 0, as for codes that are all zero, the scale stays.
// Afterwards the error is orthogonal to the codes: values that lie on a grid already (weights that
// were quantised before) are not all stretched the same way, which would add up over layers.
// Arguments and errors as above; codes in, scale in and out.
Status refit_int_scales(ConstTensorView x, ConstTensorView codes, std::int64_t group,
                        TensorView scale);

// With zero points: the group's range is widened to contain 0, s = range / (2^bits - 1),
// z = RNE(-low / s), q = clamp(RNE(x / s) + z, 0, 2^bits - 1). Zero is exact.
//   codes U8 [N, K], scale as above, zeros U8 as scale
Status quantize_uint_group(ConstTensorView x, const IntGroupFormat& format, TensorView codes,
                           TensorView scale, TensorView zeros);

// out = (q - z) * s, one product in fp32, rounded once to out's dtype.
//   codes  [N, K]              in, I8 or U8
//   scale  [N, ceil(K/group)]  in, F32, BF16 or F16
//   zeros  as scale            in, U8; or not present(): z = 0
//   out    [N, K]              out, F32, BF16 or F16
Status dequantize_int_group(ConstTensorView codes, ConstTensorView scale, ConstTensorView zeros,
                            std::int64_t group, TensorView out);

}  // namespace moesaic::quant
