// What a layer makes of the sum of its routed experts, by whichever kernel has that sum.
#pragma once

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// output = scale * sum + shared + zero_weight * x, in fp32 in this order, rounded once.
struct SumEpilogue {
  const void* shared = nullptr;  // [tokens, hidden] of shared_dtype, or null
  DType shared_dtype = DType::kBF16;
  const float* zero_weight = nullptr;  // [tokens], or null
  const void* x = nullptr;             // [tokens, hidden] of x_dtype, read with zero_weight
  DType x_dtype = DType::kBF16;
  float scale = 1.0F;
  void* output = nullptr;  // [tokens, hidden] F32 or BF16; may be x of the same size
  bool output_f32 = true;
};

}  // namespace moesaic::cuda
