// FP8 (e4m3) weights with one scale per 128x128 tile, as plain loops: the quantiser that makes test
// and benchmark weights, and the dequantiser that says what stored weights mean. Activations:
// fp8_group.h. Source: block quantisation of DeepSeek-V3 checkpoints and DeepGEMM.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "quant/block_scales.h"

namespace moesaic::quant {

// Whether a scale is rounded up to a power of two (the UE8M0 form, held in an F32).
enum class ScaleRounding : std::uint8_t { kNone, kCeilPowerOfTwo };

// Smallest amax that a tile is taken to have: keeps 1/scale finite for tiles of zeros.
inline constexpr float kFp8BlockMinAmax = 1e-4F;

// scale = max(amax of the tile, 1e-4) / 448 (below 1e-4 / 448 without that floor:
// fp8_weight_scale.h), optionally rounded up to a power of two;
// q = e4m3(w * (1 / scale)). All in fp32.
//   w      [.., N, K]                     in, F32, BF16 or F16, contiguous, rank 2 or 3, finite
//   q      [.., N, K]                     out, F8_E4M3, contiguous
//   scale  [.., ceil(N/n), ceil(K/k)]     out, F32, contiguous
// No two may overlap. Errors: kInvalidArgument (a NaN or infinite weight, naming its index; a block
// size < 1), kInvalidDType, kInvalidShape, kInvalidLayout, kAliasing. Deterministic; a tile depends
// on its own elements only. Relative RMS error about 0.026 on normal data.
Status quantize_fp8_block(ConstTensorView w, BlockShape block, ScaleRounding rounding, TensorView q,
                          TensorView scale);

// out = e4m3(q) * scale of its tile, the product in fp32, rounded once to the output's dtype.
//   q      [.., N, K]                  in, F8_E4M3 (NaN codes give NaN)
//   scale  [.., ceil(N/n), ceil(K/k)]  in, F32, BF16 or F8_E8M0, values as validate_block_scales
//   out    [.., N, K]                  out, F32, BF16 or F16, no overlap
// All contiguous. Errors as above, and those of validate_block_scales.
Status dequantize_fp8_block(ConstTensorView q, ConstTensorView scale, BlockShape block,
                            TensorView out);

}  // namespace moesaic::quant
