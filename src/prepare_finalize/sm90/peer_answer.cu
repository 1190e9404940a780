#include <cuda_runtime.h>

#include "cuda/sum_epilogue.cuh"
#include "permute/sm90/combine.cuh"
#include "prepare_finalize/sm90/peer_rows.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerAnswerForm;
using parallel::PeerKind;

// Columns of a row that a warp sends, and that a block adds up, at a time: a call of few rows has work
// for all (docs/lab/ranks.md).
constexpr int kAnswerColumns = 512, kSumColumns = 4 * kPeerThreads;

// What of a row's slots is here, found by a warp together.
struct SlotsHere {
  unsigned ranks = 0;       // that have an expert of the row, this one or another
  std::uint64_t slots = 0;  // with an expert here, of the first 64
};
__device__ __forceinline__ SlotsHere slots_here(const PeerAnswerParams& p,
                                                const std::int32_t* ids) {
  const auto top_k = static_cast<int>(p.place.layout.shape.top_k);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  SlotsHere here;
  unsigned ranks = 0;
  for (int j0 = 0; j0 < top_k; j0 += 32) {
    const std::int32_t id = j0 + lane < top_k ? ids[j0 + lane] : -1;
    bool mine = names_expert(p.routing, id);
    if (mine && p.routing.owner != nullptr) ranks |= 1U << p.routing.owner[id];
    if (mine && p.expert_map != nullptr) mine = p.expert_map[id] >= 0;
    const unsigned lanes = __ballot_sync(kWholeWarp, mine);
    if (j0 < kPeerMostSlots) here.slots |= std::uint64_t{lanes} << j0;
  }
  here.ranks = p.routing.owner != nullptr ? __reduce_or_sync(kWholeWarp, ranks)
                                          : ranks_of(p.place, p.routing, ids);
  return here;
}

// The sum of the slots of a row that `here` has, columns first to end, by a warp.
__device__ __forceinline__ void add_slots(const PeerAnswerParams& p, std::int64_t row,
                                          std::uint64_t here, std::byte* to, int first, int end) {
  constexpr int kAtOnce = 4;
  const auto top_k = static_cast<int>(p.place.layout.shape.top_k);
  MOESAIC_CUDA_FAULT(cuda_peer_answer_without_its_last_slot, here &= ~(1ULL << (top_k - 1));)
  const std::uint16_t* const slots = p.slot_rows + row * top_k * p.hidden;
  for (int h = first + static_cast<int>(threadIdx.x % 32) * 8; h < end; h += 32 * 8) {
    float sum[8] = {};
    for (std::uint64_t left = here; left != 0;) {
      uint4 v[kAtOnce];
      std::uint64_t asked = left;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (asked == 0) break;
        const std::int64_t j = __ffsll(static_cast<long long>(asked)) - 1;
        v[u] = __ldcg(reinterpret_cast<const uint4*>(slots + j * p.hidden + h));
        asked &= asked - 1;
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (left == 0) break;
        add_row(sum, v[u]);
        left &= left - 1;
      }
    }
    if (p.bf16) {
      *reinterpret_cast<uint4*>(to + h * 2) =
          make_uint4(ptx::bf16x2(sum[0], sum[1]), ptx::bf16x2(sum[2], sum[3]),
                     ptx::bf16x2(sum[4], sum[5]), ptx::bf16x2(sum[6], sum[7]));
    } else {
      auto* const columns = reinterpret_cast<float4*>(to + h * 4);
      columns[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      columns[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
  }
}

// One warp per part of a row.
__global__ void __launch_bounds__(kPeerThreads, 4)
    peer_answer(const __grid_constant__ PeerAnswerParams p, int parts, std::int64_t part_bytes) {
  begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const std::uint32_t epoch = epoch_of_call(place);
  if (block_has_ended(place)) return;
  const std::int64_t items = layout.shape.ranks * layout.shape.tokens * parts;
  const std::int64_t bytes = layout.shape.answer_bytes;
  const auto top_k = static_cast<int>(layout.shape.top_k);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kPeerWarps + threadIdx.x / 32;
       i < items; i += static_cast<std::int64_t>(gridDim.x) * kPeerWarps) {
    const std::int64_t row = i / parts;
    const ArrivedRow at = arrived_row(place, row);
    const std::int32_t* const ids = p.routing.ids + at.row * top_k;
    const std::int32_t live = place.live[at.source];
    const SlotsHere here = slots_here(p, ids);
    if (at.token >= live || (here.ranks >> place.rank & 1) == 0) continue;
    const std::int64_t first = (i - row * parts) * part_bytes;
    const std::int64_t end = bytes - first < part_bytes ? bytes : first + part_bytes;
    std::byte* const home = place.base[at.source];
    if (layout.shape.form == PeerAnswerForm::kSlot) {
      for (int j = 0; j < top_k; ++j) {
        const std::int32_t id = ids[j];
        if (!names_expert(p.routing, id) || p.routing.owner[id] != place.rank) continue;
        copy_by_warp(home + layout.slot(at.token, j) + first,
                     p.results + (at.row * top_k + j) * bytes + first, (end - first) / 16);
      }
    } else if (p.slot_rows != nullptr) {
      const int element = p.bf16 ? 2 : 4;
      add_slots(p, at.row, here.slots, home + layout.partial(place.rank, at.token),
                static_cast<int>(first) / element, static_cast<int>(end) / element);
    } else {
      copy_by_warp(home + layout.partial(place.rank, at.token) + first,
                   p.results + at.row * bytes + first, (end - first) / 16);
    }
  }
  publish(place, PeerKind::kAnswers, kAnswerTicket, epoch, 0);
}

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

// Adds up rows `pitch` bytes apart from `first` on that have a bit in `rows`, in ascending order.
template <bool kBf16>
__device__ __forceinline__ void add_rows(float (&sum)[4], unsigned rows, const std::byte* first,
                                         std::int64_t pitch, int column) {
  constexpr int kAtOnce = 4;
  while (rows != 0) {
    FourColumns<kBf16> v[kAtOnce];
    unsigned asked = rows;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (asked == 0) break;
      v[u].load(first + (__ffs(static_cast<int>(asked)) - 1) * pitch, column);
      asked &= asked - 1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (rows == 0) break;
      v[u].add_to(sum);
      rows &= rows - 1;
    }
  }
}

// One block per part of a token's row.
template <bool kBf16>
__global__ void __launch_bounds__(kPeerThreads, 4)
    peer_sum(const __grid_constant__ PeerSumParams p, int parts) {
  begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const bool ended = block_has_ended(place);
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t i = blockIdx.x; i < p.tokens * parts; i += gridDim.x) {
    const std::int64_t t = i / parts;
    const int h = static_cast<int>(i - t * parts) * kSumColumns + static_cast<int>(threadIdx.x) * 4;
    const std::int32_t* const ids = p.routing.ids + t * top_k;
    float sum[4] = {};
    if (ended) {
      for (float& s : sum) s = __uint_as_float(0x7FC00000U);
    } else if (layout.shape.form == PeerAnswerForm::kSlot) {
      for (int j0 = 0; j0 < top_k; j0 += 32) {
        const std::int32_t id = j0 + lane < top_k ? ids[j0 + lane] : -1;
        const unsigned some = __ballot_sync(kWholeWarp, names_expert(p.routing, id));
        if (h < p.hidden) {
          add_rows<kBf16>(sum, some, own(place) + layout.slot(t, j0), layout.answer_pitch, h);
        }
      }
    } else {
      unsigned answered = place.sent_to[t];
      MOESAIC_CUDA_FAULT(cuda_peer_sum_forgets_the_last_rank,
                         answered &= ~(1U << (layout.shape.ranks - 1));)
      if (h < p.hidden) {
        add_rows<kBf16>(sum, answered, own(place) + layout.partial(0, t),
                        layout.shape.tokens * layout.answer_pitch, h);
      }
    }
    if (h < p.hidden) finish_four(p.to, t, t * p.hidden + h, sum);
  }
  if (is_last_block(place.tickets + kSumTicket) && threadIdx.x == 0 && !ended) {
    MOESAIC_CUDA_FAULT(cuda_peer_epoch_stands_still, return;)
    *epoch_line(place) += 1;
  }
}

}  // namespace

int launch_peer_answer(const PeerAnswerParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const parallel::PeerShape& shape = p.place.layout.shape;
  const std::int64_t part = kAnswerColumns * (p.bf16 ? 2 : 4);
  const std::int64_t parts = (shape.answer_bytes + part - 1) / part;
  const std::int64_t items = shape.ranks * shape.tokens * parts;
  return launch_peer_kernel(p.place, peer_answer,
                            peer_blocks(p.place, (items + kPeerWarps - 1) / kPeerWarps),
                            kPeerThreads, 0, stream, p, static_cast<int>(parts), part);
}

int launch_peer_sum(const PeerSumParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const int parts = (p.hidden + kSumColumns - 1) / kSumColumns;
  const unsigned blocks = peer_blocks(p.place, p.tokens * parts);
  return launch_peer_kernel(p.place, p.bf16 ? peer_sum<true> : peer_sum<false>, blocks,
                            kPeerThreads, 0, stream, p, parts);
}

}  // namespace moesaic::cuda
