#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/cuda_general/elements.cuh"
#include "experts/cuda_general/general_kernels.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A warp per row and the columns that share a scale: first their largest magnitude, then the values.
__global__ void __launch_bounds__(kThreads)
    general_values(const __grid_constant__ GeneralValues p) {
  const std::int64_t width = p.rule.columns > 0 ? p.rule.columns : p.columns;
  const std::int64_t groups = (p.columns + width - 1) / width;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  std::int64_t items = p.num_rows != nullptr ? *p.num_rows : p.items;
  MOESAIC_CUDA_FAULT(cuda_general_values_leave_a_row_of_slabs, if (p.num_rows != nullptr)-- items;)
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp; i < items * groups;
       i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t item = i / groups, group = i - item * groups;
    std::int64_t from = item / p.share, to = item;
    std::int32_t expert = 0;
    if (p.row_of_pair != nullptr) {
      const std::int32_t place = p.row_of_pair[item];
      if (place < 0) continue;  // no expert here: nobody reads the row
      if (p.by_place) from = to = place;
      expert = p.topk_ids[item];
      if (p.expert_map != nullptr) expert = p.expert_map[expert];
    } else if (p.num_rows != nullptr) {
      const std::int64_t row = p.row_of[item];
      if (!p.by_place) from = to = row;
      expert = static_cast<std::int32_t>(row / p.slab_rows);
    }
    MOESAIC_CUDA_FAULT(cuda_general_values_of_the_first_expert, expert = 0;)
    const float fixed = p.fixed == nullptr ? 1.0F : p.fixed[expert];
    const std::int32_t* order = p.perm == nullptr ? nullptr : p.perm + expert * p.columns;
    MOESAIC_CUDA_FAULT(cuda_general_values_in_their_own_order, order = nullptr;)
    const float* const factor = p.factor == nullptr ? nullptr : p.factor + item;
    const std::int64_t first = group * width, end = min(first + width, p.columns);
    const auto element = [&](std::int64_t column) {
      const std::int64_t at = order == nullptr ? column : order[column];
      return operand_element(p.x, p.x_dtype, from * p.columns + at, p.round, factor);
    };
    const auto larger = [&](float a, float b) {
      return p.rule.codes == ValueRule::Codes::kI8 ? ptx::max_nan(a, b) : fmaxf(a, b);
    };
    float amax = 0;
    for (std::int64_t c = first + lane; c < end; c += 32) amax = larger(amax, fabsf(element(c)));
    MOESAIC_CUDA_FAULT(cuda_general_values_have_the_amax_of_a_lane, if (lane != 0) amax = 0.0F;)
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) amax = larger(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
    const ValueScale scale = value_scale(p.rule, amax, fixed);
    for (std::int64_t c = first + lane; c < end; c += 32) {
      p.values[to * p.columns + c] = row_value(p.rule, scale, fixed, element(c));
    }
  }
}

}  // namespace

int launch_general_values(const GeneralValues& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t width = p.rule.columns > 0 ? p.rule.columns : p.columns;
  const std::int64_t groups = p.items * ((p.columns + width - 1) / width);
  if (groups == 0) return 0;
  return launch_kernel(general_values, looping_blocks(groups, kWarps), kThreads, 0, stream, p);
}

}  // namespace moesaic::cuda
