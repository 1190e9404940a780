#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/quant_rows.cuh"
#include "permute/sm90/align_batched.h"
#include "permute/sm90/block_scan.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = kMaxAlignedExperts;  // a thread per expert
static_assert(kThreads == 1024);
constexpr int kBlockGroups = kThreads / 16;  // that a block quantises at once

// The largest e with starts[e] <= i; starts [kMaxAlignedExperts] ascends from 0.
__device__ __forceinline__ std::int32_t expert_at(const std::int32_t* starts, std::int32_t i) {
  std::int32_t e = 0;
#pragma unroll
  for (std::int32_t step = kMaxAlignedExperts / 2; step > 0; step /= 2) {
    if (starts[e + step] <= i) e += step;
  }
  return e;
}

// The rows of the list, in the order of experts; for quantize_groups.
struct SlabRows {
  const std::int32_t* first_rows;
  std::int32_t slab_rows;

  __device__ __forceinline__ OperandRow operator()(std::uint32_t r) const {
    const auto at = static_cast<std::int32_t>(r);
    const std::int32_t e = expert_at(first_rows, at);
    const auto pair = static_cast<std::uint32_t>(e) * static_cast<std::uint32_t>(slab_rows) +
                      (r - static_cast<std::uint32_t>(first_rows[e]));
    return {pair, pair, e};
  }
  __device__ __forceinline__ std::uint32_t row(std::uint32_t r) const { return (*this)(r).to; }
};

// Every block counts all rows, so that none waits for another, and writes and quantises its share.
template <RowForms kForms>
__global__ void __launch_bounds__(kThreads, 1)
    list_and_quantize_slabs(const __grid_constant__ BatchedListParams p,
                            const __grid_constant__ QuantRowsParams q) {
  __shared__ std::int32_t first_rows[kMaxAlignedExperts], first_groups[kMaxAlignedExperts];
  __shared__ std::int32_t expert_rows[kMaxAlignedExperts], sums[2][32], all[2];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t rows = thread < p.experts ? p.counts[thread] : 0;
  MOESAIC_CUDA_FAULT(cuda_batched_list_takes_full_slabs_as_empty, if (rows > p.slab_rows) rows = 0;)
  rows = min(max(rows, 0), p.slab_rows);
  const std::int32_t groups = (rows + p.rows_per_record - 1) / p.rows_per_record;
  std::int32_t last_row = rows, last_group = groups;
  block_scan(last_row, last_group, sums);
  expert_rows[thread] = rows;
  first_rows[thread] = last_row - rows;
  first_groups[thread] = last_group - groups;
  if (thread == kThreads - 1) {
    all[0] = last_row;
    all[1] = last_group;
  }
  __syncthreads();
  const std::int32_t num_rows = all[0], num_groups = all[1];

  const std::int32_t first = static_cast<std::int32_t>(blockIdx.x) * kThreads + thread;
  const std::int32_t step = static_cast<std::int32_t>(gridDim.x) * kThreads;
  const SlabRows slabs{first_rows, p.slab_rows};
  if (first == 0) {
    *p.next_item = 0;
    *p.num_groups = static_cast<std::uint32_t>(num_groups);
    if (p.num_rows != nullptr) *p.num_rows = static_cast<std::uint32_t>(num_rows);
  }
  for (std::int32_t i = first; i < num_groups; i += step) {
    const std::int32_t e = expert_at(first_groups, i);
    p.groups[i] = {e, first_rows[e], expert_rows[e], first_groups[e]};
    p.group_done[i] = 0;
  }
  for (std::int32_t i = first; i < p.bands + (p.zero_rows ? num_rows : 0); i += step) {
    p.band_done[i] = 0;
  }
  for (std::int32_t r = first; r < num_rows; r += step) {
    auto pair = static_cast<std::int32_t>(slabs.row(static_cast<std::uint32_t>(r)));
    MOESAIC_CUDA_FAULT(cuda_batched_list_packs_the_slabs, pair = r;)
    p.pair_of_row[r] = pair;
  }
  const std::uint32_t parts =
      row_is_whole(q.form) ? 2 : static_cast<std::uint32_t>((q.columns + 127) / 128);
  std::uint32_t quantised = static_cast<std::uint32_t>(num_rows) * parts;
  MOESAIC_CUDA_FAULT(cuda_batched_list_leaves_the_last_row_as_it_was,
                     quantised -= num_rows > 0 ? parts : 0;)
  if (quantised == 0) return;
  quantize_groups<kForms, 4>(q, blockIdx.x * kBlockGroups + threadIdx.x / 16,
                             gridDim.x * kBlockGroups, quantised, slabs);
}

}  // namespace

int launch_batched_list(const BatchedListParams& params, const QuantRowsParams* quant,
                        const DeviceTraits& device, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const QuantRowsParams q = quant != nullptr ? *quant : QuantRowsParams();
  const std::int64_t rows = std::int64_t{params.experts} * params.slab_rows;
  // At most; how many there are is known on the device only.
  const std::int64_t work = std::max((rows + kThreads - 1) / kThreads / 4,
                                     rows * ((q.columns + 127) / 128) / kBlockGroups);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::clamp<std::int64_t>(work, 1, device.sms)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = forms_with(q.form) == RowForms::kGroups
                          ? list_and_quantize_slabs<RowForms::kGroups>
                          : list_and_quantize_slabs<RowForms::kAll>;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, params, q));
}

}  // namespace moesaic::cuda
