// Which arithmetic a pair of operand formats means: what the stages that round and multiply share.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic {

// The arithmetic that a QuantScheme asks for. Taken from its operands, never from its name, so that
// a scheme put together by hand means the same. All accumulate in fp32. "Quantised" operands are
// hidden states and intermediate rounded to activation_dtype first.
enum class ComputeScheme : std::uint8_t {
  kF32,  // weights of any format, exactly as stored; fp32 arithmetic, no rounding before the output
  kBF16,       // hidden states and intermediate rounded to bf16, weights bf16
  kF16,        // the same with f16
  kFp8Block,   // e4m3 weights with 128x128 scales; hidden states and intermediate quantised to e4m3
               // per row and 128 columns (scales rounded up to a power of two when their format is
               // E8M0: a backend honours that or refuses)
  kFp8Bf16,    // the same weights; hidden states and intermediate rounded to bf16
  kMxfp4Bf16,  // e2m1 weights with a power-of-two scale per row and 32 columns; hidden states and
               // intermediate rounded to bf16
  kWeightOnly,  // every other quantised weight format; hidden states and intermediate rounded to
                // bf16, entries of a code table rounded to bf16
  kFp8Scaled,  // e4m3 with one scale per expert or per output row; quantised to e4m3 with one scale
               // per row (dynamic), or the expert's static one
  kMxfp8,      // e4m3 with a power-of-two scale per 32; quantised the same way (scale: CEIL)
  kMxfp4Fp8,   // e2m1 with a power-of-two scale per 32; e4m3 per 128 columns, row or tensor
  kMxfp4,      // the same weights; quantised to e2m1 per 32 (scale: ROUND@1.75)
  kNvfp4,      // e2m1 with an e4m3 scale per 16 and a global one; quantised the same way, with a
               // static global scale
  kInt4Fp8,    // int4 times an e4m3 scale per 128, that product rounded to e4m3; a scale per output
               // row; quantised to e4m3 with one scale per row
  kInt8,       // int8 with a scale per output row; quantised to int8 with one scale per row
};
std::string_view compute_scheme_name(ComputeScheme scheme);
// kUnsupported for any other pair of operands (the text says which operand and what is possible).
Result<ComputeScheme> compute_scheme(const QuantScheme& quant);

// Rows and columns of a weight matrix that share a scale.
inline constexpr std::int64_t kMxGroup = 32;

// The dtype that hidden states and the activation's result are rounded to before a GEMM reads them
// (or before they are quantised): F32 in the F32 scheme, activation_dtype in all others.
inline DType operand_dtype(DType activation_dtype, ComputeScheme scheme) {
  return scheme == ComputeScheme::kF32 ? DType::kF32 : activation_dtype;
}
// Schemes whose hidden states must be bf16: those of weights alone.
inline bool needs_bf16_activations(ComputeScheme scheme) {
  return scheme == ComputeScheme::kBF16 || scheme == ComputeScheme::kFp8Bf16 ||
         scheme == ComputeScheme::kMxfp4Bf16 || scheme == ComputeScheme::kWeightOnly;
}

}  // namespace moesaic
