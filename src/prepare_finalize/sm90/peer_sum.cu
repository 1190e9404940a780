#include <cuda_runtime.h>

#include "cuda/sum_epilogue.cuh"
#include "prepare_finalize/sm90/peer_await.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerAnswerForm;
using parallel::PeerKind;

// Four columns of an answer; added as launch_sum_answers adds them.
template <bool kBf16>
struct FourColumns {
  uint2 v;
  __device__ __forceinline__ void load(const std::byte* row, int column) {
    v = *reinterpret_cast<const uint2*>(row + column * 2);
  }
  __device__ __forceinline__ void add_to(float (&sum)[4]) const {
    sum[0] += __uint_as_float(v.x << 16);
    sum[1] += __uint_as_float(v.x & 0xFFFF0000U);
    sum[2] += __uint_as_float(v.y << 16);
    sum[3] += __uint_as_float(v.y & 0xFFFF0000U);
  }
};
template <>
struct FourColumns<false> {
  float4 v;
  __device__ __forceinline__ void load(const std::byte* row, int column) {
    v = *reinterpret_cast<const float4*>(row + column * 4);
  }
  __device__ __forceinline__ void add_to(float (&sum)[4]) const {
    sum[0] += v.x;
    sum[1] += v.y;
    sum[2] += v.z;
    sum[3] += v.w;
  }
};

// Adds up rows `pitch` bytes apart from `first` on that have a bit in `rows`, in ascending order: four
// columns of each from `column` on, and from each further `stride`, as far as there are so many.
template <bool kBf16, int kQuads>
__device__ __forceinline__ void add_rows(float (&sum)[kQuads][4], unsigned rows,
                                         const std::byte* first, std::int64_t pitch, int column,
                                         int stride, int columns) {
  constexpr int kAtOnce = 4;
  while (rows != 0) {
    FourColumns<kBf16> v[kAtOnce][kQuads];
    unsigned asked = rows;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (asked == 0) break;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (column + q * stride >= columns) break;
        v[u][q].load(first + (__ffs(static_cast<int>(asked)) - 1) * pitch, column + q * stride);
      }
      asked &= asked - 1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (rows == 0) break;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (column + q * stride < columns) v[u][q].add_to(sum[q]);
      }
      rows &= rows - 1;
    }
  }
}

// One block per part of a token's row, kQuads times four columns a thread.
template <bool kBf16, int kQuads>
__global__ void __launch_bounds__(kPeerThreads, 2)
    peer_sum(const __grid_constant__ PeerSumParams p, int parts, bool waits) {
  __shared__ std::int32_t live[parallel::kPeerWindowRanks];
  touch_params(p);
  if (!waits) begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const int stride = static_cast<int>(blockDim.x) * 4, columns = stride * kQuads;
  // Asked for before the wait.
  const unsigned first_sent_to =
      blockIdx.x < p.tokens * parts ? place.sent_to[blockIdx.x / parts] : 0;
  const bool ended = !await_words(place, PeerKind::kAnswers, epoch_of_answers(place), live);
  if (waits) begin_peer_kernel();
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t i = blockIdx.x; i < p.tokens * parts; i += gridDim.x) {
    const std::int64_t t = i / parts;
    const int h = static_cast<int>(i - t * parts) * columns + static_cast<int>(threadIdx.x) * 4;
    const std::int32_t* const ids = p.routing.ids + t * top_k;
    float sum[kQuads][4] = {};
    if (ended) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        for (float& s : sum[q]) s = __uint_as_float(0x7FC00000U);
      }
    } else if (layout.shape.form == PeerAnswerForm::kSlot) {
      for (int j0 = 0; j0 < top_k; j0 += 32) {
        const std::int32_t id = j0 + lane < top_k ? ids[j0 + lane] : -1;
        const unsigned some = __ballot_sync(kWholeWarp, id >= 0 && id < p.routing.num_experts);
        add_rows<kBf16, kQuads>(sum, some, own(place) + layout.slot(t, j0), layout.answer_pitch, h,
                                stride, p.hidden);
      }
    } else {
      unsigned answered = i == blockIdx.x ? first_sent_to : place.sent_to[t];
      MOESAIC_CUDA_FAULT(cuda_peer_sum_forgets_the_last_rank,
                         answered &= ~(1U << (layout.shape.ranks - 1));)
      add_rows<kBf16, kQuads>(sum, answered, own(place) + layout.partial(0, t),
                              layout.shape.tokens * layout.answer_pitch, h, stride, p.hidden);
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int column = h + q * stride;
      if (column < p.hidden) finish_four(p.to, t, t * p.hidden + column, sum[q]);
    }
  }
}

}  // namespace

int launch_peer_sum(const PeerSumParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  // As many columns a thread as leave what it asks for at once in its registers.
  const int quads = p.bf16 ? 2 : 1;
  const auto parts_of = [&](unsigned threads) {
    const int columns = static_cast<int>(threads) * 4 * quads;
    return (p.hidden + columns - 1) / columns;
  };
  // Large blocks where so few can wait by themselves, else small ones, which fit a row better.
  const bool large =
      parts_of(kPeerFewThreads) > 1 && parts_of(kPeerThreads) * p.tokens <= p.place.most_waiting;
  const unsigned threads = large ? kPeerThreads : kPeerFewThreads;
  const int parts = parts_of(threads);
  const unsigned blocks = peer_blocks(parts * p.tokens, most_blocks(p.place, threads));
  const bool waits = may_wait(p.place, blocks);
  if (!waits) {
    if (const int error = launch_peer_wait(p.place, PeerKind::kAnswers, stream)) return error;
  }
  return launch_peer_kernel(p.place, p.bf16 ? peer_sum<true, 2> : peer_sum<false, 1>, blocks,
                            threads, 0, stream, p, parts, waits);
}

}  // namespace moesaic::cuda
