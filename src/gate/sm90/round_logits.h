// What happens to logits behind the gate's kernels, which write fp32: a kernel of its own.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// to[i] = from[i] rounded to `linear`, then to `logits` (each F32: not at all, BF16 or F16: nearest
// even). With row_factors, from[i] is multiplied with its row's before that, rounded to fp32, and
// bias, where there is one, added.
struct RoundLogitsParams {
  const float* from = nullptr;  // [count]
  std::int64_t count = 0;
  DType linear = DType::kF32, logits = DType::kF32;
  const float* row_factors = nullptr;  // [count / columns] or null
  const float* bias = nullptr;         // [columns] or null; with row_factors
  std::int32_t columns = 1;
  void* to = nullptr;  // [count] of to_dtype: F32 (may be `from`), or of `logits`
  DType to_dtype = DType::kF32;
};
// Ordered behind everything on the stream; capturable. Returns a cudaError_t value.
int launch_round_logits(const RoundLogitsParams& params, void* stream);

}  // namespace moesaic::cuda
