// The last step of a layer on the CPU: a row's parts added up and rounded once.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/kernels.h"
#include "layer/rank_plan.h"
#include "moesaic/tensor.h"

namespace moesaic::layer {

// A factor times each row of a matrix [.., H] in fp32.
struct RowPart {
  const float* rows = nullptr;  // null: no part
  std::int64_t first = 0;       // row t of the sum is row t - first here
  float factor = 1.0F;
  const float* factors = nullptr;  // [..] of each row instead, or null
  RowRange only = {0, -1};         // other rows have no such part; count < 0: all have
};

// output row t of [.., H] F32, BF16 or F16, for t in rows: the products of the parts in their order,
// each product and each sum rounded to fp32, the last one to the output's dtype. The first part is
// always there; rows of it may be those of the output. The bits do not depend on the threads,
// of which there are num_threads at most.
void add_row_parts(const cpu::CpuKernels& kernels, const std::array<RowPart, 3>& parts,
                   RowRange rows, const TensorView& output, int num_threads);

}  // namespace moesaic::layer
