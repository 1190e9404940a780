#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/once_per_device.h"
#include "cuda/ptx/sync.cuh"
#include "cuda/quant_rows.cuh"
#include "permute/sm90/align_compared.cuh"
#include "permute/sm90/align_plan.h"
#include "permute/sm90/block_scan.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = kAlignThreads, kWarps = kThreads / 32;
constexpr int kClusterBlocks = kAlignClusterBlocks, kHeld = kAlignHeld;
constexpr int kGroupThreads = kAlignGroupThreads, kBlockGroups = kAlignBlockGroups;

__device__ __forceinline__ int local_expert(const AlignParams& p, std::int32_t id) {
  if (id < 0 || id >= p.num_experts) return -1;
  if (p.expert_map != nullptr) id = p.expert_map[id];
  return id < p.num_local_experts ? id : -1;
}

// The pairs of rows that are there, counted from 0: where those of each source begin, and all.
struct LivePairs {
  std::int32_t first[kMaxRowSources + 1];
};
__device__ __forceinline__ void count_live_pairs(const AlignParams& p, LivePairs& pairs) {
  if (threadIdx.x >= 32) return;
  const auto source = static_cast<int>(threadIdx.x);
  std::int32_t end = source < p.rows.sources ? p.rows.live[source] * p.rows.top_k : 0;
  for (int d = 1; d < 32; d <<= 1) {
    const std::int32_t below = __shfl_up_sync(0xFFFFFFFFU, end, static_cast<unsigned>(d));
    if (source >= d) end += below;
  }
  if (source == 0) pairs.first[0] = 0;
  pairs.first[source + 1] = end;
}
// The place of pair i of them.
__device__ __forceinline__ std::int32_t pair_at(const AlignParams& p, const LivePairs& pairs,
                                                std::int32_t i) {
  if (p.rows.live == nullptr) return i;
  int source = 0;
  while (source + 1 < p.rows.sources && i >= pairs.first[source + 1]) ++source;
  MOESAIC_CUDA_FAULT(cuda_align_live_rows_of_the_first_source, source = 0;)
  return source * p.rows.places * p.rows.top_k + i - pairs.first[source];
}

// The list by clusters of p.blocks blocks. The warps of a cluster have a slice of p.steps times 32
// pairs each, in ascending order; lanes with the same expert find their order by ballots and
// popcount, so ranks are stable without atomics. Every cluster counts all pairs, so that none waits
// for another, and places those of some steps, or of some warps of a step: scattered stores, of
// which a multiprocessor takes one a cycle.
__device__ __forceinline__ void place_pairs(const AlignParams& p, std::int32_t* counts) {
  // counts: a line of p.num_local_experts per warp, then sums over the block, then first rows.
  __shared__ std::int32_t sums[2][kWarps];
  __shared__ LivePairs there;
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int experts = p.num_local_experts, block = static_cast<int>(blockIdx.x);
  const int part = block / p.blocks, rank = block - part * p.blocks;
  const int own_step = part / p.shares;  // of the first kHeld
  std::int32_t* const totals = counts + kWarps * experts;
  std::int32_t* const first_rows = totals + experts;
  // Of all pairs; of those of rows that are there, which come later, not more.
  std::int32_t pairs = p.pairs, steps = p.steps;
  std::int32_t slice = steps * 32, block_begin = rank * kWarps * slice;
  int live = min(kWarps, (max(pairs - block_begin, 0) + slice - 1) / slice);
  const int zeroed = p.rows.live == nullptr ? live : kWarps;
  for (int i = thread; i < zeroed * experts; i += kThreads) counts[i] = 0;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (part == p.parts - 1) {
    const int first = rank * kThreads + thread, step = p.blocks * kThreads;
    if (first == 0) *p.next_item = 0;
    for (int i = first; i < p.bands; i += step) p.band_done[i] = 0;
    for (int i = first; i < p.max_groups; i += step) p.group_done[i] = 0;
  }
  if (p.rows.live != nullptr) count_live_pairs(p, there);
  __syncthreads();
  if (p.rows.live != nullptr) {
    pairs = there.first[p.rows.sources];
    steps = max(1, (pairs + p.blocks * kThreads - 1) / (p.blocks * kThreads));
    slice = steps * 32;
    block_begin = rank * kWarps * slice;
    live = min(kWarps, (max(pairs - block_begin, 0) + slice - 1) / slice);
  }

  std::int32_t* const mine = counts + warp * experts;
  const std::int32_t begin = block_begin + warp * slice + lane;
  const std::int32_t own = begin + own_step * 32;  // of the first steps, this cluster's pair
  const bool has_own = own < pairs && own_step < steps && warp % p.shares == part % p.shares;
  const float weight = has_own ? p.topk_weights[pair_at(p, there, own)] : 0.0F;
  int own_expert = -1, own_rank = 0;
  for (int s = 0; s < steps && warp < live; s += kHeld) {
    int e[kHeld];
    unsigned same[kHeld];  // lanes with the same expert
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const std::int32_t pair = begin + (s + i) * 32;
      e[i] = s + i < steps && pair < pairs ? p.topk_ids[pair_at(p, there, pair)] : -1;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      e[i] = local_expert(p, e[i]);
      same[i] = __ballot_sync(0xFFFFFFFFU, e[i] >= 0);
    }
    // By a ballot per bit: match.any takes as long as about 30 of them.
    for (int bit = 1; bit < experts; bit <<= 1) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (s + i >= steps) break;
        const bool set = (e[i] & bit) != 0;
        const unsigned with = __ballot_sync(0xFFFFFFFFU, set);
        same[i] &= set ? with : ~with;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (s + i >= steps) break;
      const std::int32_t before = e[i] >= 0 ? mine[e[i]] : 0;
      __syncwarp();
      if (e[i] >= 0 && lane == __ffs(static_cast<int>(same[i])) - 1) {
        mine[e[i]] = before + __popc(same[i]);
      }
      __syncwarp();
      if (i != own_step) continue;
      const std::int32_t r = before + __popc(same[i] & ((1U << lane) - 1));
      if (s == 0) {
        own_expert = e[i];
        own_rank = r;
      } else if (own + s * 32 < pairs) {
        p.row_of_pair[pair_at(p, there, own + s * 32)] = r;  // read again below
      }
    }
  }
  __syncthreads();

  std::int32_t rows = 0, before = 0;  // of the expert: in all blocks, in earlier ones
  const int e = thread;
  if (e < experts) {
    constexpr int kBatch = 8;
    for (int w0 = 0; w0 < live; w0 += kBatch) {
      std::int32_t n[kBatch];
#pragma unroll
      for (int w = 0; w < kBatch; ++w) n[w] = w0 + w < live ? counts[(w0 + w) * experts + e] : 0;
#pragma unroll
      for (int w = 0; w < kBatch; ++w) {
        if (w0 + w < live) counts[(w0 + w) * experts + e] = rows;
        rows += n[w];
      }
    }
    totals[e] = rows;
  }
  if (p.blocks > 1) {
    cluster.sync();
    if (e < experts) {
      rows = 0;
#pragma unroll
      for (int b = 0; b < kClusterBlocks; ++b) {
        const std::int32_t n = cluster.map_shared_rank(totals, static_cast<unsigned>(b))[e];
        rows += n;
        if (b < rank) before += n;
      }
    }
  }
  MOESAIC_CUDA_FAULT(cuda_align_rows_of_other_blocks_not_counted, before = 0;)
  const std::int32_t groups = (rows + p.rows_per_record - 1) / p.rows_per_record;
  std::int32_t last_row = rows, last_group = groups;
  block_scan(last_row, last_group, sums);
  bool fits = true;  // every block comes to the same conclusion
  if (p.capacity > 0) {
    std::int32_t most = p.capacity;
    MOESAIC_CUDA_FAULT(cuda_align_full_list_is_refused, --most;)
    fits = __syncthreads_or(last_row > most ? 1 : 0) == 0;
  }
  if (e < experts) {
    first_rows[e] = last_row - rows + before;
    if (part == 0 && fits) {
      const GroupRecord record = {e, last_row - rows, rows, last_group - groups};
      for (std::int32_t i = rank; i < groups; i += p.blocks)
        p.groups[record.first_group + i] = record;
    }
  }
  if (block == 0 && thread == kThreads - 1) {
    *p.num_groups = fits ? static_cast<std::uint32_t>(last_group) : 0;
    if (p.capacity > 0) p.num_groups[1] = static_cast<std::uint32_t>(last_row);
  }
  __syncthreads();

  const auto place = [&](std::int32_t pair, int expert, std::int32_t r, float w) {
    const std::int32_t row = expert >= 0 && fits ? first_rows[expert] + mine[expert] + r : -1;
    p.row_of_pair[pair] = row;
    if (row < 0) return;
    p.pair_of_row[row] = pair;
    p.weight_of_row[row] = w;
    if (p.capacity > 0) p.pair_of_row[p.capacity + row] = row;
    MOESAIC_CUDA_FAULT(cuda_align_loses_weights, p.weight_of_row[row] = 1.0F;)
  };
  if (has_own) place(pair_at(p, there, own), own_expert, own_rank, weight);
  for (int s = kHeld; s + own_step < steps; s += kHeld) {
    if (own + s * 32 < pairs) {
      const std::int32_t pair = pair_at(p, there, own + s * 32);
      place(pair, local_expert(p, p.topk_ids[pair]), p.row_of_pair[pair], p.topk_weights[pair]);
    }
  }
  // Other blocks may still be reading this block's totals.
  if (p.blocks > 1) cluster.sync();
}

// The first blocks make the work list while the others quantise `alone` groups of rows; then all
// blocks quantise the remaining groups.
template <RowForms kForms>
__global__ void __launch_bounds__(kThreads, 1)
    align_and_quantize(const __grid_constant__ AlignParams p,
                       const __grid_constant__ QuantRowsParams q, unsigned alone) {
  extern __shared__ std::int32_t counts[];
  const auto placing = static_cast<unsigned>(p.blocks * p.parts);
  const bool places = blockIdx.x < placing;
  if (places && p.pairs > kComparedPairs) {
    place_pairs(p, counts);
  } else {
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
    if (places) {
      __shared__ __align__(16) std::uint32_t codes[kComparedPairs];
      place_compared_pairs(p, codes);
    }
  }
  const unsigned group = threadIdx.x / kGroupThreads, all = count_groups(q);
#pragma unroll 1
  for (int turn = places ? 1 : 0; turn < (alone < all ? 2 : 1); ++turn) {
    const unsigned first = turn == 0 ? blockIdx.x - placing : blockIdx.x;
    const unsigned blocks = turn == 0 ? gridDim.x - placing : gridDim.x;
    quantize_groups<kForms, 4>(q, (turn == 0 ? 0 : alone) + first * kBlockGroups + group,
                               blocks * kBlockGroups, turn == 0 ? alone : all);
  }
}

}  // namespace

int launch_align(const AlignParams& params, const QuantRowsParams* quant,
                 const DeviceTraits& device, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  static OncePerDevice once;
  const cudaError_t prepared = once([] {
    constexpr int kBytes =
        (kWarps + 2) * kMaxAlignedExperts * static_cast<int>(sizeof(std::int32_t));
    const cudaError_t error = cudaFuncSetAttribute(
        align_and_quantize<RowForms::kGroups>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    return error != cudaSuccess
               ? error
               : cudaFuncSetAttribute(align_and_quantize<RowForms::kAll>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  });
  if (prepared != cudaSuccess) return static_cast<int>(prepared);
  const QuantRowsParams q = quant != nullptr ? *quant : QuantRowsParams();
  const std::int64_t groups = made_rows(q) * ((q.columns + 127) / 128), parts = quant_parts(q);
  AlignGrid grid = plan_align(params.pairs, groups, device);
  if (parts != groups) {  // whole rows: as many as those groups are
    grid.alone = groups == 0 ? 0 : static_cast<std::uint32_t>(grid.alone * parts / groups / 2 * 2);
  }
  AlignParams p = params;
  p.blocks = grid.blocks;
  p.parts = grid.parts;
  p.steps = grid.steps;
  p.shares = grid.shares;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kClusterBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.blocks * p.parts + grid.quantizing));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = p.pairs <= kComparedPairs
                                ? 0
                                : static_cast<std::size_t>(kWarps + 2) *
                                      static_cast<std::size_t>(p.num_local_experts) *
                                      sizeof(std::int32_t);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = p.blocks > 1 ? 2 : 1;
  const auto kernel = forms_with(q.form) == RowForms::kGroups
                          ? align_and_quantize<RowForms::kGroups>
                          : align_and_quantize<RowForms::kAll>;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, p, q, grid.alone));
}

}  // namespace moesaic::cuda
