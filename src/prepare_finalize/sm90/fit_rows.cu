#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "prepare_finalize/sm90/fit_rows.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 16;

template <class T>
__global__ void __launch_bounds__(kThreads) fit_rows(const __grid_constant__ FitRowsParams p) {
  const std::int64_t count = p.rows * p.to_columns;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / p.to_columns, column = i - row * p.to_columns;
    T value = 0;
    if (column < p.from_columns) {
      value = static_cast<const T*>(p.from)[row * p.from_columns + column];
    }
    MOESAIC_CUDA_FAULT(cuda_fit_rows_as_one_array,
                       value = static_cast<const T*>(p.from)[i % (p.rows * p.from_columns)];)
    static_cast<T*>(p.to)[i] = value;
  }
}

}  // namespace

int launch_fit_rows(const FitRowsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t count = params.rows * params.to_columns;
  if (count == 0) return 0;
  const auto blocks =
      static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  return launch_kernel(
      params.element_bytes == 2 ? fit_rows<std::uint16_t> : fit_rows<std::uint32_t>, blocks,
      kThreads, 0, stream, params);
}

}  // namespace moesaic::cuda
