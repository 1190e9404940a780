// The rows that the reference experts multiply: rounded and, where the scheme says so, quantised by
// scalar code. Values are decoded again at once (every product of two codes is exact in fp32).
#pragma once

#include <cstdint>

#include "moesaic/quant.h"

namespace moesaic::experts {

// A row that a GEMM reads.
struct RefOperand {
  const float* values = nullptr;
  const float* scales = nullptr;  // one per `group` columns; nullptr: not quantised
  std::int64_t group = 0;         // 0: scales[0] belongs to the whole row
  float outer = 1.0F;             // static global scale
};

// Quantises row[count] in place as activations of format `a`: row becomes the values of the codes,
// scales[ceil(count / group)] the scales in force. codes: room for `count` bytes.
//   e4m3 per group, F32 or E8M0 scales   quant/fp8_group.h
//   e4m3 per 32, E8M0 (CEIL)             scale byte of amax / 448 rounded up; byte 0: zeros
//   e2m1 per 32, E8M0 (ROUND@1.75)       byte 0: zeros
//   e2m1 per 16, E4M3                    sf = e4m3(gscale * (amax / 6)), x * (gscale / sf);
//                                        gscale = 1 / input_scale
//   e4m3 per row                         max(amax / 448, 1 / (448 * 512))
//   e4m3 static                          x * (1 / input_scale)
//   int8 per row or group                amax / 127 (1 for zeros), nearest even
// Plain formats are returned as they are.
// Source: docs/spec/quantization.md sections 2, 4 to 8.
RefOperand ref_quantize_row(const OperandQuant& a, float input_scale, float* row,
                            std::int64_t count, float* scales, std::uint8_t* codes);

// Scales that ref_quantize_row writes for a row of `count` elements, at most.
std::int64_t ref_max_scales(const OperandQuant& a, std::int64_t count);

}  // namespace moesaic::experts
