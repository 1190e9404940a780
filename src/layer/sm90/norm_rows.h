// The input norm of a layer on a GPU.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// RMS normalisation of rows, as layer/cpu/input_norm.h has it: with root = sqrt(mean of x^2 + eps), x / root
// times `weight` to `weighted`, and what a gate multiplies: x / root to `normed`, or x times a power of
// two, exactly, to `scaled`, whose products times `factors` are those of x / root. The mean is a double,
// its order fixed. Capturable.
struct NormRowsParams {
  const void* x = nullptr;  // [tokens, hidden]
  DType x_dtype = DType::kBF16;
  std::int64_t tokens = 0, hidden = 0;
  double eps = 0;
  const float* weight = nullptr;    // [hidden]
  float* normed = nullptr;          // [tokens, hidden], or null
  std::uint16_t* scaled = nullptr;  // [tokens, hidden] BF16, or null: x of BF16 only
  float* factors = nullptr;         // [tokens], with scaled: in (1/2, 1]
  void* weighted = nullptr;         // [tokens, hidden] BF16 or F32
  DType weighted_dtype = DType::kBF16;
};
// Returns a cudaError_t value.
int launch_norm_rows(const NormRowsParams& params, void* stream);

}  // namespace moesaic::cuda
