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

// RMS normalisation of rows, as layer/input_norm.h has it: x / sqrt(mean of x^2 + eps) to `normed`, that
// times `weight` to `weighted`; the mean is a double, its order fixed. Capturable.
struct NormRowsParams {
  const void* x = nullptr;  // [tokens, hidden]
  DType x_dtype = DType::kBF16;
  std::int64_t tokens = 0, hidden = 0;
  double eps = 0;
  const float* weight = nullptr;  // [hidden]
  float* normed = nullptr;        // [tokens, hidden], or null
  void* weighted = nullptr;       // [tokens, hidden] BF16 or F32
  DType weighted_dtype = DType::kBF16;
};
int launch_norm_rows(const NormRowsParams& params, void* stream);

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
