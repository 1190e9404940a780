// Operand rows of GEMM1 in F16 from hidden states of any float dtype, with the router weight multiplied
// in first where the model asks for it.
#pragma once

#include <cstdint>

#include "moesaic/kinds.h"

namespace moesaic::cuda {

struct HalfRowsParams {
  const void* x = nullptr;         // [tokens, columns], 16-byte aligned, columns a multiple of 8
  DType dtype = DType::kF32;       // F32, BF16 or F16
  const float* weights = nullptr;  // [tokens]: f16(f16(x) * f16(weight)); null: f16(x)
  std::int64_t tokens = 0, columns = 0;
  std::uint16_t* rows = nullptr;  // [tokens, columns], 16-byte aligned
};

// Values past F16's range become infinite. Returns a cudaError_t value.
int launch_half_rows(const HalfRowsParams& params, void* stream);

}  // namespace moesaic::cuda
