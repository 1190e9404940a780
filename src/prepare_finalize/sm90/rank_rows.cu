#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "prepare_finalize/sm90/rank_rows.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;

__device__ __forceinline__ float from_bf16(std::uint16_t code) {
  return __uint_as_float(static_cast<std::uint32_t>(code) << 16);
}
__device__ __forceinline__ std::uint16_t to_bf16(float v) {
  std::uint16_t r = 0;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

// Block r makes the list of rank r: an ordered compaction, so that the lists are a function of the
// ids alone.
__global__ void __launch_bounds__(kPlanThreads)
    send_plan(const __grid_constant__ SendPlanParams p) {
  __shared__ int warp_rows[kPlanWarps];
  const int rank = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int listed = 0;
  for (int first = 0; first < p.tokens; first += kPlanThreads) {
    const int t = first + static_cast<int>(threadIdx.x);
    bool goes = false;
    if (t < p.tokens) {
      for (int j = 0; j < p.top_k; ++j) {
        const std::int32_t id = p.ids[static_cast<std::int64_t>(t) * p.top_k + j];
        if (id >= 0 && id < p.num_experts) goes = goes || p.owner[id] == rank;
      }
    }
    const unsigned going = __ballot_sync(0xFFFFFFFFU, goes);
    if (lane == 0) warp_rows[warp] = __popc(going);
    __syncthreads();
    int before = listed + __popc(going & ((1U << lane) - 1));
    int total = 0;
    for (int w = 0; w < kPlanWarps; ++w) {
      if (w < warp) before += warp_rows[w];
      total += warp_rows[w];
    }
    if (t < p.tokens) {
      p.position[static_cast<std::int64_t>(t) * p.ranks + rank] = goes ? before : -1;
      if (goes) p.index[static_cast<std::int64_t>(rank) * p.capacity + before] = t;
    }
    listed += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.counts[rank] = p.host_counts[rank] = listed;
}

// One block per row.
__global__ void __launch_bounds__(kThreads)
    pack_rows(const __grid_constant__ MessageRow row, const __grid_constant__ RowArrays from,
              const std::int32_t* index, std::int64_t row_bytes, std::byte* to) {
  std::int64_t t = index != nullptr ? index[blockIdx.x] : blockIdx.x;
  MOESAIC_CUDA_FAULT(cuda_ranks_pack_the_first_rows, t = blockIdx.x;)
  std::byte* const message = to + static_cast<std::int64_t>(blockIdx.x) * row_bytes;
  const auto* hidden = reinterpret_cast<const uint4*>(from.hidden + t * row.hidden_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < row.hidden_bytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(message)[i] = hidden[i];
  }
  auto* const tail = reinterpret_cast<std::uint32_t*>(message + row.hidden_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < row.groups; i += kThreads) {
    tail[i] = __float_as_uint(from.scale[i * from.scale_stride + t]);
  }
  for (int i = static_cast<int>(threadIdx.x); i < row.top_k; i += kThreads) {
    tail[row.groups + i] = static_cast<std::uint32_t>(from.ids[t * row.top_k + i]);
    tail[row.groups + row.top_k + i] = __float_as_uint(from.weights[t * row.top_k + i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_rows(const __grid_constant__ MessageRow row, const std::byte* from,
                std::int64_t row_bytes, const __grid_constant__ RowArrays to, std::int64_t first) {
  const std::int64_t t = first + blockIdx.x;
  const std::byte* const message = from + static_cast<std::int64_t>(blockIdx.x) * row_bytes;
  auto* hidden = reinterpret_cast<uint4*>(to.hidden + t * row.hidden_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < row.hidden_bytes / 16; i += kThreads) {
    hidden[i] = reinterpret_cast<const uint4*>(message)[i];
  }
  const auto* const tail = reinterpret_cast<const std::uint32_t*>(message + row.hidden_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < row.groups; i += kThreads) {
    to.scale[i * to.scale_stride + t] = __uint_as_float(tail[i]);
  }
  for (int i = static_cast<int>(threadIdx.x); i < row.top_k; i += kThreads) {
    to.ids[t * row.top_k + i] = static_cast<std::int32_t>(tail[row.groups + i]);
    to.weights[t * row.top_k + i] = __uint_as_float(tail[row.groups + row.top_k + i]);
    MOESAIC_CUDA_FAULT(cuda_ranks_lose_weights, to.weights[t * row.top_k + i] = 1.0F;)
  }
}

// Four columns of a row.
template <bool kBf16>
__device__ __forceinline__ void add_row(float (&sum)[4], const void* rows, std::int64_t at) {
  if constexpr (kBf16) {
    const ushort4 v =
        *reinterpret_cast<const ushort4*>(static_cast<const std::uint16_t*>(rows) + at);
    sum[0] += from_bf16(v.x);
    sum[1] += from_bf16(v.y);
    sum[2] += from_bf16(v.z);
    sum[3] += from_bf16(v.w);
  } else {
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(rows) + at);
    sum[0] += v.x;
    sum[1] += v.y;
    sum[2] += v.z;
    sum[3] += v.w;
  }
}

__device__ __forceinline__ void store_sum(const AnswerParams& p, std::int64_t at,
                                          const float (&sum)[4]) {
  if (p.dtype == DType::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.sum) + at) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) store_element(p.sum, p.dtype, at + i, sum[i]);
}

// One block per token. first: the answers of the ranks before.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads) sum_answers(const __grid_constant__ AnswerParams p) {
  const std::int64_t t = blockIdx.x;
  for (int h = static_cast<int>(threadIdx.x) * 4; h < p.hidden; h += kThreads * 4) {
    float sum[4] = {};
    std::int64_t first = 0;
    for (int r = 0; r < p.ranks; ++r) {
      const std::int64_t row = p.position != nullptr ? p.position[t * p.ranks + r] : t;
      MOESAIC_CUDA_FAULT(cuda_ranks_sum_one_answer, if (r > 0) continue;)
      if (row >= 0) add_row<kBf16>(sum, p.answers, (first + row) * p.hidden + h);
      first += p.position != nullptr ? p.counts[r] : p.tokens;
    }
    store_sum(p, t * p.hidden + h, sum);
  }
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads) sum_slots(const __grid_constant__ AnswerParams p) {
  const std::int64_t t = blockIdx.x;
  for (int h = static_cast<int>(threadIdx.x) * 4; h < p.hidden; h += kThreads * 4) {
    float sum[4] = {};
    for (int j = 0; j < p.top_k; ++j) {
      const std::int32_t id = p.ids[t * p.top_k + j];
      if (id < 0 || id >= p.num_experts) continue;
      const int rank = p.owner[id];
      std::int64_t row = rank * p.tokens + t;
      if (p.position != nullptr) {
        row = p.position[t * p.ranks + rank];
        for (int r = 0; r < rank; ++r) row += p.counts[r];
      }
      const std::int64_t at = (row * p.top_k + j) * p.hidden + h;
      if (p.weights == nullptr) {
        add_row<kBf16>(sum, p.answers, at);
        continue;
      }
      float v[4] = {};
      add_row<kBf16>(v, p.answers, at);
      float weight = p.weights[t * p.top_k + j];
      MOESAIC_CUDA_FAULT(cuda_ranks_slots_unweighted, weight = 1.0F;)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, v[i]));
    }
    store_sum(p, t * p.hidden + h, sum);
  }
}

template <bool kBf16>
__global__ void __launch_bounds__(kThreads)
    sum_in_order(const void* parts, int num_parts, std::int64_t count, void* to) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    float sum = 0;
    for (int r = 0; r < num_parts; ++r) {
      const float v = kBf16 ? from_bf16(static_cast<const std::uint16_t*>(parts)[r * count + i])
                            : static_cast<const float*>(parts)[r * count + i];
      sum = r == 0 ? v : __fadd_rn(sum, v);
    }
    if constexpr (kBf16) {
      static_cast<std::uint16_t*>(to)[i] = to_bf16(sum);
    } else {
      static_cast<float*>(to)[i] = sum;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    drop_weightless(const std::int32_t* ids, const float* weights, std::int64_t count,
                    std::int32_t* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = weights[i] == 0.0F ? -1 : ids[i];
}

}  // namespace

int launch_send_plan(const SendPlanParams& p, void* stream) {
  return launch_kernel(send_plan, static_cast<unsigned>(p.ranks), kPlanThreads, 0, stream, p);
}

int launch_pack_rows(const MessageRow& row, const RowArrays& from, const std::int32_t* index,
                     std::int64_t count, std::byte* to, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (count == 0) return 0;
  return launch_kernel(pack_rows, static_cast<unsigned>(count), kThreads, 0, stream, row, from,
                       index, row.bytes(), to);
}

int launch_unpack_rows(const MessageRow& row, const std::byte* from, std::int64_t count,
                       const RowArrays& to, std::int64_t first, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (count == 0) return 0;
  return launch_kernel(unpack_rows, static_cast<unsigned>(count), kThreads, 0, stream, row, from,
                       row.bytes(), to, first);
}

int launch_sum_answers(const AnswerParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.tokens == 0) return 0;
  const auto blocks = static_cast<unsigned>(p.tokens);
  return launch_kernel(p.bf16 ? sum_answers<true> : sum_answers<false>, blocks, kThreads, 0, stream,
                       p);
}

int launch_sum_slots(const AnswerParams& p, void* stream) {
  if (p.tokens == 0) return 0;
  const auto blocks = static_cast<unsigned>(p.tokens);
  return launch_kernel(p.bf16 ? sum_slots<true> : sum_slots<false>, blocks, kThreads, 0, stream, p);
}

int launch_sum_in_order(const void* parts, int num_parts, std::int64_t count, bool bf16, void* sum,
                        void* stream) {
  if (count == 0) return 0;
  return launch_kernel(bf16 ? sum_in_order<true> : sum_in_order<false>,
                       looping_blocks(count, kThreads), kThreads, 0, stream, parts, num_parts,
                       count, sum);
}

int launch_drop_weightless(const std::int32_t* ids, const float* weights, std::int64_t count,
                           std::int32_t* to, void* stream) {
  if (count == 0) return 0;
  return launch_kernel(drop_weightless, static_cast<unsigned>((count + kThreads - 1) / kThreads),
                       kThreads, 0, stream, ids, weights, count, to);
}

}  // namespace moesaic::cuda
