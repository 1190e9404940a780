#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "prepare_finalize/sm90/slabs.h"

namespace moesaic::cuda {
namespace {

constexpr int kFillThreads = 256;

__device__ __forceinline__ float rounded(DType dtype, float v) {
  std::uint32_t cell = 0;
  store_element(&cell, dtype, 0, v);
  return load_element(&cell, dtype, 0);
}

// A row by all threads of the block.
__device__ __forceinline__ void copy_to_slab(const FillSlabsParams& p, bool vectors,
                                             std::int64_t token, std::int64_t pair,
                                             std::int64_t to) {
  if (vectors) {
    const std::int64_t count = p.columns * (p.dtype == DType::kF32 ? 4 : 2) / 16;
    const auto* const from = reinterpret_cast<const uint4*>(
        static_cast<const std::byte*>(p.x) + token * p.x_stride * (p.dtype == DType::kF32 ? 4 : 2));
    auto* const row = static_cast<uint4*>(p.slabs) + to * count;
    for (std::int64_t i = threadIdx.x; i < count; i += kFillThreads) row[i] = from[i];
    return;
  }
  const float factor = p.weights != nullptr ? rounded(p.dtype, p.weights[pair]) : 1.0F;
  for (std::int64_t i = threadIdx.x; i < p.columns; i += kFillThreads) {
    float v = rounded(p.dtype, load_element(p.x, p.x_dtype, token * p.x_stride + i));
    if (p.weights != nullptr) v = __fmul_rn(v, factor);
    store_element(p.slabs, p.dtype, to * p.columns + i, v);
  }
}

// A block per slot at a time.
__global__ void __launch_bounds__(kFillThreads)
    fill_slabs(const __grid_constant__ FillSlabsParams p, bool vectors) {
  __shared__ std::int32_t first_rows[kMaxAlignedExperts], rows[kMaxAlignedExperts];
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t e = thread; e < p.num_local_experts; e += kFillThreads) rows[e] = 0;
  __syncthreads();
  const auto groups = p.num_local_experts > 0 ? static_cast<std::int32_t>(*p.num_groups) : 0;
  for (std::int32_t i = thread; i < groups; i += kFillThreads) {
    const GroupRecord record = p.groups[i];
    first_rows[record.expert] = record.first_row;
    rows[record.expert] = record.rows;
  }
  __syncthreads();
  for (std::int32_t e = thread; blockIdx.x == 0 && e < p.num_local_experts; e += kFillThreads) {
    p.counts[e] = min(rows[e], p.slab_rows);
    MOESAIC_CUDA_FAULT(cuda_slabs_count_one_row_too_few, p.counts[e] = max(p.counts[e] - 1, 0);)
  }
  for (std::int64_t pair = blockIdx.x; pair < p.pairs; pair += gridDim.x) {
    const std::int32_t at = p.num_local_experts > 0 ? p.row_of_pair[pair] : -1;
    std::int32_t slot_row = kNoSlabRow;
    if (at >= 0) {
      // It has been found valid when the list was made.
      std::int32_t e = p.topk_ids[pair];
      if (p.expert_map != nullptr) e = p.expert_map[e];
      const std::int32_t place = at - first_rows[e];
      slot_row = place < p.slab_rows ? e * p.slab_rows + place : kNoRoom;
    }
    if (thread == 0) p.slot_rows[pair] = slot_row;
    std::int64_t token = pair / p.top_k;
    MOESAIC_CUDA_FAULT(cuda_slabs_have_the_first_row, token = 0;)
    if (slot_row >= 0) copy_to_slab(p, vectors, token, pair, slot_row);
  }
}

// A block per slot at a time.
__global__ void __launch_bounds__(kFillThreads)
    copy_slot_rows(const __grid_constant__ SlotRowsParams p, bool vectors) {
  for (std::int64_t slot = blockIdx.x; slot < p.slots; slot += gridDim.x) {
    std::int64_t row = p.slot_rows[slot];
    MOESAIC_CUDA_FAULT(cuda_slot_rows_are_the_first, row = row < 0 ? row : 0;)
    if (vectors && row >= 0) {
      const std::int64_t count = p.columns * (p.dtype == DType::kF32 ? 4 : 2) / 16;
      const auto* const from = static_cast<const uint4*>(p.slabs) + row * count;
      auto* const to = static_cast<uint4*>(p.to) + slot * count;
      for (std::int64_t i = threadIdx.x; i < count; i += kFillThreads) to[i] = from[i];
      continue;
    }
    for (std::int64_t i = threadIdx.x; i < p.columns; i += kFillThreads) {
      float v = row == kNoSlabRow ? 0.0F : __int_as_float(0x7FC00000);
      if (row >= 0) v = load_element(p.slabs, p.slabs_dtype, row * p.columns + i);
      store_element(p.to, p.dtype, slot * p.columns + i, v);
    }
  }
}

constexpr std::int64_t kMostBlocks = 2048;

}  // namespace

int launch_slot_rows(const SlotRowsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (params.slots == 0) return 0;
  const bool vectors = params.slabs_dtype == params.dtype &&
                       params.columns * (dtype_bits(params.dtype) / 8) % 16 == 0;
  return launch_kernel(copy_slot_rows, static_cast<unsigned>(std::min(params.slots, kMostBlocks)),
                       kFillThreads, 0, stream, params, vectors);
}

int launch_fill_slabs(const FillSlabsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (params.pairs == 0) return 0;
  const auto address = reinterpret_cast<std::uintptr_t>(params.x);
  const std::int64_t element = dtype_bits(params.dtype) / 8;
  const bool vectors = params.weights == nullptr && params.x_dtype == params.dtype &&
                       address % 16 == 0 && params.x_stride * element % 16 == 0 &&
                       params.columns * element % 16 == 0;
  return launch_kernel(fill_slabs,
                       static_cast<unsigned>(std::min<std::int64_t>(params.pairs, kMostBlocks)),
                       kFillThreads, 0, stream, params, vectors);
}

}  // namespace moesaic::cuda
