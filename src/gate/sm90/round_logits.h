// The kernel that rounds logits behind the gate's, which write fp32.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// to[i] = from[i] rounded to `linear`, then to `logits` (each F32: not at all, BF16 or F16: nearest
// even).
struct RoundLogitsParams {
  const float* from = nullptr;  // [count]
  std::int64_t count = 0;
  DType linear = DType::kF32, logits = DType::kF32;
  void* to = nullptr;  // [count] of to_dtype: F32 (may be `from`), or of `logits`
  DType to_dtype = DType::kF32;
};
// Ordered behind everything on the stream; capturable. Returns a cudaError_t value.
int launch_round_logits(const RoundLogitsParams& params, void* stream);

}  // namespace moesaic::cuda
