// Elementwise kernels of the layer that no stage owns.
#pragma once

#include <cstdint>

#include "cuda/sum_epilogue.h"
#include "moesaic/dtype.h"

namespace moesaic::cuda {

// [count] F32 or F16 rounded to bf16 (nearest even). Capturable. Returns a cudaError_t value.
int launch_round_to_bf16(const void* from, DType dtype, std::int64_t count, std::uint16_t* to,
                         void* stream);

// [count] F32 rounded to F16 (nearest even). Capturable.
int launch_round_to_f16(const float* from, std::int64_t count, std::uint16_t* to, void* stream);

// [count] F32, BF16 or F16 widened, exactly. Capturable.
int launch_widen_to_f32(const void* from, DType dtype, std::int64_t count, float* to, void* stream);

// Zeros in the rows [row_bytes] whose mask is not zero; row_bytes is a multiple of 2.
int launch_clear_rows(const std::uint8_t* mask, std::int64_t rows, std::int64_t row_bytes, void* to,
                      void* stream);

// That of sums in memory; see SumEpilogue.
struct LayerCombineParams : SumEpilogue {
  const float* routed = nullptr;  // [tokens, hidden], may be `output`
  std::int64_t tokens = 0, hidden = 0;
};
int launch_layer_combine(const LayerCombineParams& params, void* stream);

}  // namespace moesaic::cuda
