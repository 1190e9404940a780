// Which row of the canonical matrix a row of a slab is: repack.h.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "experts/sm90/repack.h"

namespace moesaic::cuda {

// -1: past the matrix.
__device__ __forceinline__ std::int64_t matrix_row(const RepackShape& shape, std::int64_t band,
                                                   int slab, int block, int w, int hi, int g) {
  if (!shape.gated) {
    const std::int64_t row = band * 256 + slab * 128 + 32 * w + 4 * g + 2 * block + hi;
    return row < shape.rows ? row : -1;
  }
  const std::int64_t channel = band * 128 + slab * 64 + 16 * w + 2 * g + block;
  if (channel >= shape.rows / 2) return -1;
  MOESAIC_CUDA_FAULT(cuda_repack_gate_and_up_swapped, hi = 1 - hi;)
  return hi != 0 ? shape.rows / 2 + channel : channel;
}

}  // namespace moesaic::cuda
