// A plain matrix as stored weights of any scheme of the catalogue: the inverse of
// dequantize_weight, for conversion on loading, benchmarks and accuracy tables. Which quantiser a
// format has is decided here once; how it rounds is in its own file.
#pragma once

#include <cstdint>

#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "quant/dequantize_weight.h"

namespace moesaic::quant {

// Owns the tensors of a StoredMatrix; those that the format does not have are not present().
struct QuantizedMatrix {
  Tensor weight, scale, global_scale, channel_scale, zero;
  StoredMatrix view() const;
};

//   plain            rounded to the dtype
//   e4m3             per tensor, row, 128x128 tile (rows_per_part as in dequantize_weight)
//   e4m3, e2m1 MX    groups of 32; scales rounded up for e4m3, at 1.75 for e2m1
//   e2m1, e4m3 scales per 16 with a global scale (NVFP4)
//   I8               per row or group;  I4 per group (compressed-tensors' scale), or with e4m3 group scales
//                    and a channel scale (W4A8)
//   U4 tables        per group of 32, 64 ..., at least 32 columns: nf4, fp4
//   U4, U8           per group with zero points
// w [N, K] F32, contiguous, finite. kUnsupported names the operand for anything else (minima,
// act-order); kInvalidShape for a K that the groups do not cut; kInvalidArgument for NaN, infinity.
Result<QuantizedMatrix> quantize_weight(const OperandQuant& quant, ConstTensorView w,
                                        std::int64_t rows_per_part);

// Relative RMS error of that rounding on normal data, of weights and activations; per-tensor and
// per-row scales count as the finer ones do, which holds where rows differ by less than the format's
// range. Infinity for a format that is in no scheme. Source: docs/spec/quantization.md section 15;
// docs/accuracy.md has the measurements.
double rounding_error(const OperandQuant& q);

// Factor on a measured error: other data than the measured sample may round worse.
inline constexpr double kRoundingMargin = 1.15;
// Gate, up and down each add the weights' relative error to the output's: sqrt(3) times it in
// quadrature, with a margin of a third.
inline constexpr double kWeightErrorGain = 2.31;

}  // namespace moesaic::quant
