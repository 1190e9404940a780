#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "prepare_finalize/sm90/slabs.h"
#include "prepare_finalize/sm90/slot_sums.h"

namespace moesaic::cuda {
namespace {

constexpr int kSumThreads = 256;

// Of the slot's expert; kNoSlabRow: it has none here.
__device__ __forceinline__ std::int64_t row_of_slot(const SlotSumsParams& p, std::int64_t slot) {
  if (p.slot_rows != nullptr) {
    std::int64_t row = p.slot_rows[slot];
    MOESAIC_CUDA_FAULT(cuda_slot_sums_of_the_first_row, row = row < 0 ? row : 0;)
    return row;
  }
  const std::int32_t id = p.ids[slot];
  if (id < 0 || id >= p.experts) return kNoSlabRow;
  bool here = p.expert_map == nullptr || p.expert_map[id] >= 0;
  MOESAIC_CUDA_FAULT(cuda_slot_sums_read_remote_rows, here = true;)
  return here ? slot : kNoSlabRow;
}

// A block for each token. Products and sums are rounded one by one, as on the CPU.
__global__ void __launch_bounds__(kSumThreads) sum_slots(const __grid_constant__ SlotSumsParams p) {
  const std::int64_t first = std::int64_t{blockIdx.x} * p.top_k;
  for (std::int64_t h = threadIdx.x; h < p.hidden; h += kSumThreads) {
    float sum = 0.0F;
#pragma unroll 2  // by four it keeps more than it has registers for
    for (std::int64_t slot = first; slot < first + p.top_k; ++slot) {
      const std::int64_t row = row_of_slot(p, slot);
      if (row == kNoSlabRow) continue;
      float weight = p.weights != nullptr ? p.weights[slot] : 1.0F;
      MOESAIC_CUDA_FAULT(cuda_slot_sums_unweighted, weight = 1.0F;)
      float v = __int_as_float(0x7FC00000);
      if (row >= 0) v = load_element(p.rows, p.rows_dtype, row * p.hidden + h);
      MOESAIC_CUDA_FAULT(cuda_slot_sums_pass_over_lost_rows, if (row < 0) v = 0.0F;)
      sum = __fadd_rn(sum, __fmul_rn(weight, v));
    }
    store_element(p.output, p.dtype, std::int64_t{blockIdx.x} * p.hidden + h, sum);
  }
}

}  // namespace

int launch_slot_sums(const SlotSumsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (params.tokens == 0) return 0;
  return launch_kernel(sum_slots, static_cast<unsigned>(params.tokens), kSumThreads, 0, stream,
                       params);
}

}  // namespace moesaic::cuda
