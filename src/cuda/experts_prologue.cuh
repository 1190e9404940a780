// Device code of experts_prologue.h, for the kernels in front of the experts.
#pragma once

#include <cstdint>

#include "cuda/experts_prologue.h"
#include "cuda/quant_rows.cuh"

namespace moesaic::cuda {

// Runs the part of a block: by thread `thread` of the `threads` threads, whole warps, that block
// `block` of `blocks` has for it. kForms: of prologue.quant.
template <RowForms kForms>
__device__ __forceinline__ void run_prologue(const ExpertsPrologue& prologue, int thread,
                                             int threads, std::uint32_t block,
                                             std::uint32_t blocks) {
  if (block == 0) {
    for (int i = thread; i < prologue.zero_words; i += threads) prologue.zero[i] = 0;
  }
  const auto at_once = static_cast<std::uint32_t>(threads / 16);
  quantize_groups<kForms>(prologue.quant, block * at_once + static_cast<std::uint32_t>(thread / 16),
                          blocks * at_once, count_groups(prologue.quant));
}

}  // namespace moesaic::cuda
