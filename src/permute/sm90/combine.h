// The last step on the device: sums the weighted expert rows of each token.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

struct CombineParams {
  const void* y2 = nullptr;  // [tokens * top_k, hidden] bf16 (`wide`: F32), already weighted
  const std::int32_t* row_of_pair = nullptr;  // [tokens * top_k]; negative: pair dropped
  const std::uint16_t* shared = nullptr;      // [tokens, hidden] bf16 added last, or null
  std::int64_t tokens = 0;
  std::int32_t top_k = 1;
  std::int32_t hidden = 0;  // a multiple of 8
  bool output_f32 = false;
  bool wide = false, output_f16 = false;  // the latter with `wide` only
  void* output = nullptr;                 // [tokens, hidden] bf16, F32 or F16
};

// fp32 sum in slot order, one rounding; a token without live slots gets zeros (plus `shared`).
// Deterministic: a token's bits depend on its own rows only. Returns a cudaError_t value.
int launch_combine(const CombineParams& params, void* stream);

}  // namespace moesaic::cuda
