#include <cuda_runtime.h>

#include "cuda/once_per_device.h"
#include "cuda/ptx/sync.cuh"
#include "permute/cuda_align_few.cuh"
#include "quant/cuda_quant_rows.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kWarps = 32;

__device__ __forceinline__ int local_expert(const AlignParams& p, std::int32_t pair,
                                            std::int32_t end) {
  if (pair >= end) return -1;
  std::int32_t id = p.topk_ids[pair];
  if (id < 0 || id >= p.num_experts) return -1;
  if (p.expert_map != nullptr) id = p.expert_map[id];
  return id < p.num_local_experts ? id : -1;
}

// Inclusive sum over the CTA's 1024 threads.
__device__ __forceinline__ std::int32_t block_scan(std::int32_t v, std::int32_t* warp_sums) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const std::int32_t up = __shfl_up_sync(0xFFFFFFFFU, v, static_cast<unsigned>(d));
    if (lane >= d) v += up;
  }
  if (lane == 31) warp_sums[warp] = v;
  __syncthreads();
  if (warp == 0) {
    std::int32_t s = warp_sums[lane];
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const std::int32_t up = __shfl_up_sync(0xFFFFFFFFU, s, static_cast<unsigned>(d));
      if (lane >= d) s += up;
    }
    warp_sums[lane] = s;
  }
  __syncthreads();
  const std::int32_t before = warp > 0 ? warp_sums[warp - 1] : 0;
  __syncthreads();
  return v + before;
}

// Counts of the block's range of pairs, one line per warp. Each warp counts and later places one
// contiguous slice of the range, 32 pairs at a time; lanes with the same expert find their order by
// match and popcount. So ranks are stable without atomics.
struct Slice {
  std::int32_t begin, end;
  int count;  // slices in use
};

__device__ __forceinline__ Slice count_slices(const AlignParams& p, std::int32_t* counts) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int32_t first =
      min(static_cast<std::int32_t>(blockIdx.x) * p.pairs_per_block, p.pairs);
  const std::int32_t pairs = min(p.pairs_per_block, p.pairs - first);
  const std::int32_t length = ((pairs + kWarps - 1) / kWarps + 31) / 32 * 32;
  Slice slice;
  slice.count = length > 0 ? (pairs + length - 1) / length : 0;
  slice.begin = first + min(warp * length, pairs);
  slice.end = min(slice.begin + length, first + pairs);
  for (int i = static_cast<int>(threadIdx.x); i < slice.count * p.num_local_experts; i += 1024) {
    counts[i] = 0;
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  __syncthreads();
  std::int32_t* mine = counts + warp * p.num_local_experts;
  for (std::int32_t at = slice.begin; at < slice.end; at += 32) {
    const int e = local_expert(p, at + lane, slice.end);
    const unsigned same = __match_any_sync(0xFFFFFFFFU, e);
    if (e >= 0 && lane == __ffs(static_cast<int>(same)) - 1) mine[e] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  return slice;
}

// First of two kernels when there are many pairs: counts per block.
__global__ void __launch_bounds__(1024, 1) align_count(const __grid_constant__ AlignParams p) {
  extern __shared__ std::int32_t counts[];
  const Slice slice = count_slices(p, counts);
  const int e = static_cast<int>(threadIdx.x);
  if (e >= p.num_local_experts) return;
  std::int32_t rows = 0;
  for (int s = 0; s < slice.count; ++s) rows += counts[s * p.num_local_experts + e];
  p.block_counts[static_cast<int>(blockIdx.x) * p.num_local_experts + e] = rows;
}

// Scans the counts, writes the records (first block) and places the block's pairs.
__device__ __forceinline__ void place_pairs(const AlignParams& p, std::int32_t* counts,
                                            unsigned blocks) {
  // counts: [slices][num_local_experts]
  __shared__ std::int32_t warp_sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int experts = p.num_local_experts;
  const Slice slice = count_slices(p, counts);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *p.next_item = 0;
    for (int i = static_cast<int>(threadIdx.x); i < p.bands; i += 1024) p.band_done[i] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < p.max_groups; i += 1024) p.group_done[i] = 0;
  }
  const int e = static_cast<int>(threadIdx.x);
  std::int32_t rows = 0, before = 0;  // of the expert: in all blocks, in earlier blocks
  if (e < experts) {
    if (blocks == 1) {
      for (int s = 0; s < slice.count; ++s) rows += counts[s * experts + e];
    } else {
#pragma unroll 8
      for (unsigned b = 0; b < blocks; ++b) {
        const std::int32_t n = p.block_counts[static_cast<int>(b) * experts + e];
        rows += n;
        if (b < blockIdx.x) before += n;
      }
    }
  }
  const std::int32_t groups = (rows + p.rows_per_record - 1) / p.rows_per_record;
  const std::int32_t last_row = block_scan(rows, warp_sums);
  const std::int32_t last_group = block_scan(groups, warp_sums);
  if (e < experts) {
    const GroupRecord record = {e, last_row - rows, rows, last_group - groups};
    if (blockIdx.x == 0) {
      for (std::int32_t i = 0; i < groups; ++i) p.groups[last_group - groups + i] = record;
    }
    std::int32_t at = last_row - rows + before;
    for (int s = 0; s < slice.count; ++s) {
      const std::int32_t count = counts[s * experts + e];
      counts[s * experts + e] = at;
      at += count;
    }
  }
  if (blockIdx.x == 0 && e == 1023) *p.num_groups = static_cast<std::uint32_t>(last_group);
  __syncthreads();

  std::int32_t* mine = counts + warp * experts;
  for (std::int32_t at = slice.begin; at < slice.end; at += 32) {
    const int id = local_expert(p, at + lane, slice.end);
    const unsigned same = __match_any_sync(0xFFFFFFFFU, id);
    std::int32_t row = -1;
    if (id >= 0) row = mine[id] + __popc(same & ((1U << lane) - 1));
    __syncwarp();
    if (id >= 0 && lane == __ffs(static_cast<int>(same)) - 1) mine[id] += __popc(same);
    __syncwarp();
    if (at + lane < slice.end) {
      p.row_of_pair[at + lane] = row;
      if (row >= 0) {
        p.pair_of_row[row] = at + lane;
        p.weight_of_row[row] = p.topk_weights[at + lane];
      }
    }
  }
}

// One block for all pairs.
__device__ __forceinline__ void place_in_one_block(const AlignParams& p, std::int32_t* counts) {
  if (p.pairs > kFewPairs) {
    place_pairs(p, counts, 1);
    return;
  }
  __shared__ __align__(16) std::uint32_t codes[kFewPairs];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  place_few_pairs(p, codes);
}

__global__ void __launch_bounds__(1024, 1) align_place(const __grid_constant__ AlignParams p) {
  extern __shared__ std::int32_t counts[];
  if (gridDim.x == 1) {
    place_in_one_block(p, counts);
  } else {
    place_pairs(p, counts, gridDim.x);
  }
}

// Few pairs: the first block makes the work list while the others quantise the rows.
__global__ void __launch_bounds__(1024, 1)
    align_and_quantize(const __grid_constant__ AlignParams p,
                       const __grid_constant__ QuantRowsParams q) {
  extern __shared__ std::int32_t counts[];
  if (blockIdx.x == 0) {
    place_in_one_block(p, counts);
    return;
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  quantize_groups(q, static_cast<std::int64_t>(blockIdx.x - 1) * 64 + (threadIdx.x >> 4),
                  static_cast<std::int64_t>(gridDim.x - 1) * 64);
}

template <class... Args>
cudaError_t launch(void (*kernel)(AlignParams, Args...), const AlignParams& params, int blocks,
                   cudaStream_t stream, const Args&... args) {
  const int per_warp_32 = (params.pairs_per_block + 31) / 32;
  const int slices = per_warp_32 < kWarps ? per_warp_32 : kWarps;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(1024);
  config.dynamicSmemBytes = static_cast<std::size_t>(slices) *
                            static_cast<std::size_t>(params.num_local_experts) *
                            sizeof(std::int32_t);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params, args...);
}

}  // namespace

int launch_align(const AlignParams& params, const QuantRowsParams* quant, void* stream) {
  static OncePerDevice once;
  const cudaError_t prepared = once([] {
    constexpr int kBytes = kWarps * kMaxAlignedExperts * static_cast<int>(sizeof(std::int32_t));
    constexpr auto kMost = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cudaError_t e = cudaFuncSetAttribute(align_count, kMost, kBytes);
    if (e == cudaSuccess) e = cudaFuncSetAttribute(align_place, kMost, kBytes);
    return e == cudaSuccess ? cudaFuncSetAttribute(align_and_quantize, kMost, kBytes) : e;
  });
  if (prepared != cudaSuccess) return static_cast<int>(prepared);
  AlignParams p = params;
  auto* const s = static_cast<cudaStream_t>(stream);
  if (p.pairs <= kOneBlockPairs) {
    p.pairs_per_block = p.pairs;
    if (quant != nullptr) {
      const std::int64_t groups = quant->tokens * ((quant->columns + 127) / 128);
      const int blocks = groups >= 131 * 64 ? 131 : static_cast<int>((groups + 63) / 64);
      return static_cast<int>(launch(align_and_quantize, p, blocks + 1, s, *quant));
    }
    return static_cast<int>(launch(align_place, p, 1, s));
  }
  if (quant != nullptr) {
    const int quantized = launch_quant_rows(*quant, stream);
    if (quantized != 0) return quantized;
  }
  const int blocks = p.pairs >= kMaxAlignBlocks * 1024 ? kMaxAlignBlocks : (p.pairs + 1023) / 1024;
  p.pairs_per_block = ((p.pairs + blocks - 1) / blocks + 31) / 32 * 32;
  const cudaError_t counted = launch(align_count, p, blocks, s);
  if (counted != cudaSuccess) return static_cast<int>(counted);
  return static_cast<int>(launch(align_place, p, blocks, s));
}

}  // namespace moesaic::cuda
