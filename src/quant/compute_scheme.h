// Which arithmetic a pair of operand formats means: what the stages that round and multiply share.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic {

// The arithmetic that a QuantScheme asks for. Taken from its operands, never from its name, so that
// a scheme put together by hand means the same. All accumulate in fp32.
enum class ComputeScheme : std::uint8_t {
  kF32,  // weights as stored (F32, BF16, F16, e4m3 with block scales or MXFP4); fp32 arithmetic, no
         // rounding before the output
  kBF16,      // hidden states and intermediate rounded to bf16, weights bf16
  kF16,       // the same with f16
  kFp8Block,  // e4m3 weights with 128x128 scales; hidden states and intermediate rounded to
              // activation_dtype, then quantised to e4m3 per row and 128 columns (scales rounded up
              // to a power of two when their format is E8M0: a backend honours that or refuses)
  kFp8Bf16,   // the same weights; hidden states and intermediate rounded to bf16
  kMxfp4Bf16,  // e2m1 weights with a power-of-two scale per row and 32 columns; hidden states and
               // intermediate rounded to bf16
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

}  // namespace moesaic
