#include <cuda_runtime.h>

#include <algorithm>

#include "permute/sm90/combine.cuh"
#include "prepare_finalize/sm90/peer_await.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerAnswerForm;
using parallel::PeerKind;

// Columns of a row that a warp sends at a time: a call of few rows has work for all
// (docs/lab/ranks.md).
constexpr int kAnswerColumns = 512, kAnswerFewColumns = 256;
constexpr int kMostThreads = 1024;

// A bit for each of 32 slots from j0 on whose expert is here, by a warp together; id: that of the
// lane's slot.
__device__ __forceinline__ unsigned slots_here(const PeerAnswerParams& p, const NearOwners& near,
                                               std::int32_t id) {
  bool mine = false;
  if (p.routing.owner != nullptr) {
    mine = owner_of(p.routing, near, id) == p.place.rank;
  } else if (id >= 0 && id < p.routing.num_experts) {
    mine = p.expert_map == nullptr || p.expert_map[id] >= 0;
  }
  return __ballot_sync(kWholeWarp, mine);
}

// The sum of the slots of a row that `here` has, columns first to end, by a warp.
__device__ __forceinline__ void add_slots(const PeerAnswerParams& p, std::int64_t row,
                                          std::uint64_t here, std::byte* to, int first, int end) {
  constexpr int kAtOnce = 4;
  const auto top_k = static_cast<int>(p.place.layout.shape.top_k);
  MOESAIC_CUDA_FAULT(cuda_peer_answer_without_its_last_slot, here &= ~(1ULL << (top_k - 1));)
  const auto* const slots = static_cast<const std::uint16_t*>(p.slots.rows);
  const std::int32_t* const row_of_pair = p.slots.row_of_pair;
  for (int h = first + static_cast<int>(threadIdx.x % 32) * 8; h < end; h += 32 * 8) {
    float sum[8] = {};
    for (std::uint64_t left = here; left != 0;) {
      uint4 v[kAtOnce];
      std::int64_t at[kAtOnce];  // of slots
      std::uint64_t asked = left;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (asked == 0) break;
        at[u] = row * top_k + __ffsll(static_cast<long long>(asked)) - 1;
        if (row_of_pair != nullptr) at[u] = row_of_pair[at[u]];
        asked &= asked - 1;
      }
      asked = left;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (asked == 0) break;
        v[u] = __ldcg(reinterpret_cast<const uint4*>(slots + at[u] * p.hidden + h));
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

// Whether the experts here had more pairs than there is room for: then no slot is there.
__device__ __forceinline__ bool has_too_many_pairs(const PeerAnswerParams& p) {
  MOESAIC_CUDA_FAULT(cuda_peer_answers_without_room, return false;)
  return p.slots.capacity > 0 && *p.slots.listed > p.slots.capacity;
}
// Told to all ranks by a warp.
__device__ __forceinline__ void report_too_many_pairs(const PeerAnswerParams& p,
                                                      std::uint32_t epoch) {
  const auto lane = static_cast<int>(threadIdx.x);
  parallel::PeerReport report;
  report.code = static_cast<std::uint64_t>(parallel::PeerFailure::kTooManyPairs);
  report.missing = std::uint64_t{1} << p.place.rank;
  report.reporter = static_cast<std::uint32_t>(p.place.rank);
  report.epoch = epoch;
  report.kind = static_cast<std::uint32_t>(PeerKind::kAnswers);
  report.pairs = *p.slots.listed;
  report.capacity = static_cast<std::uint32_t>(p.slots.capacity);
  if (lane < p.place.layout.shape.ranks && lane != p.place.rank) tell(p.place, lane, report);
  __syncwarp();
  if (lane == 0) end_here(p.place, report);
}

// A row that a rank has sent here.
struct ArrivedRow {
  std::int64_t row, token;
  int source;
};
__device__ __forceinline__ ArrivedRow arrived_row(const PeerPlace& p, std::int64_t i) {
  // Sources in turn, so that the links are as busy as the memory; another first one for every rank.
  const std::int64_t tokens = p.layout.shape.tokens, ranks = p.layout.shape.ranks;
  const std::int64_t token = i / ranks;
  const auto source = static_cast<int>((i - token * ranks + p.rank + 1) % ranks);
  return {source * tokens + token, token, source};
}

// One warp per part of a row.
__global__ void __launch_bounds__(kMostThreads)
    peer_answer(const __grid_constant__ PeerAnswerParams p, int parts, std::int64_t part_bytes) {
  __shared__ NearOwners near;
  touch_params(p);
  load_owners(p.routing, near);
  begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const std::int64_t bytes = layout.shape.answer_bytes;
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t warps = blockDim.x / 32;
  // All that is read at first is asked for at once.
  const bool told = threadIdx.x == 0 && has_ended(place);
  const bool too_many = has_too_many_pairs(p);
  const std::uint32_t epoch = epoch_of_answers(place);
  std::int64_t i = blockIdx.x * warps + threadIdx.x / 32;
  ArrivedRow at = {};
  std::int32_t live = 0, id = -1;
  const auto load = [&](std::int64_t item) {
    at = arrived_row(place, item / parts);
    live = place.live[at.source];
    id = lane < top_k ? p.routing.ids[at.row * top_k + lane] : -1;
  };
  if (i < layout.shape.ranks * layout.shape.tokens * parts) load(i);
  const std::int64_t items =
      layout.shape.ranks * std::int64_t{most_live(place, place.live)} * parts;
  if (__syncthreads_or(told ? 1 : 0) != 0) return;
  if (too_many) {
    if (blockIdx.x == 0 && threadIdx.x < 32) report_too_many_pairs(p, epoch);
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    std::uint32_t over = epoch;
    MOESAIC_CUDA_FAULT(cuda_peer_epoch_stands_still, --over;)
    *own_counter(place, parallel::PeerOwnLine::kEpoch) = over;
  }
  for (; i < items; i += gridDim.x * warps) {
    const std::int64_t first = i % parts * part_bytes;
    const std::int64_t end = bytes - first < part_bytes ? bytes : first + part_bytes;
    const ArrivedRow now = at;
    const std::int32_t* const ids = p.routing.ids + now.row * top_k;
    const bool there = now.token < live;  // the next row is asked for below
    std::uint64_t here = slots_here(p, near, id);
    for (int j0 = 32; j0 < top_k && (j0 < kPeerMostSlots || here == 0); j0 += 32) {
      const unsigned more = slots_here(p, near, j0 + lane < top_k ? ids[j0 + lane] : -1);
      here |= std::uint64_t{more} << 32;
    }
    if (i + gridDim.x * warps < items) load(i + gridDim.x * warps);
    // Where all ranks have all rows, all answer.
    if (!there || (here == 0 && p.routing.owner != nullptr)) continue;
    std::byte* const home = place.base[now.source];
    const auto* const slots =
        p.slots.rows == nullptr ? p.results : static_cast<const std::byte*>(p.slots.rows);
    if (layout.shape.form == PeerAnswerForm::kSlot) {
      for (int j0 = 0; j0 < top_k; j0 += 32) {
        unsigned some = slots_here(p, near, j0 + lane < top_k ? ids[j0 + lane] : -1);
        for (; some != 0; some &= some - 1) {
          const int j = j0 + __ffs(static_cast<int>(some)) - 1;
          const std::int64_t pair = now.row * top_k + j;
          const std::int64_t from =
              p.slots.row_of_pair == nullptr ? pair : p.slots.row_of_pair[pair];
          copy_by_warp(home + layout.slot(now.token, j) + first, slots + from * bytes + first,
                       (end - first) / 16);
        }
      }
    } else if (p.slots.rows != nullptr) {
      const int element = p.bf16 ? 2 : 4;
      add_slots(p, now.row, here, home + layout.partial(place.rank, now.token),
                static_cast<int>(first) / element, static_cast<int>(end) / element);
    } else {
      copy_by_warp(home + layout.partial(place.rank, now.token) + first,
                   p.results + now.row * bytes + first, (end - first) / 16);
    }
  }
  publish(place, PeerKind::kAnswers, kAnswerTicket, epoch, 0);
}

}  // namespace

int launch_peer_answer(const PeerAnswerParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const parallel::PeerShape& shape = p.place.layout.shape;
  const std::int64_t element = p.bf16 ? 2 : 4;
  const std::int64_t rows = shape.ranks * likely_rows(p.place, p.likely_tokens);
  const auto count = [&](std::int64_t columns) {
    return rows * ((shape.answer_bytes / element + columns - 1) / columns);
  };
  // Parts of rows are small where there are few, and so are blocks, until there is one for each copy
  // of a word.
  constexpr std::int64_t kCopies = parallel::kPeerWordCopies;
  const bool few = count(kAnswerFewColumns) <= kPeerFew * (kMostThreads / 32);
  const std::int64_t columns = few ? kAnswerFewColumns : kAnswerColumns;
  const std::int64_t items = count(columns);
  const std::int64_t warps =
      few ? std::clamp<std::int64_t>((items + kCopies - 1) / kCopies, 4, kMostThreads / 32)
          : kPeerThreads / 32;
  const auto threads = static_cast<unsigned>(warps * 32);
  const unsigned blocks =
      peer_blocks((items + warps - 1) / warps, few ? kCopies : most_blocks(p.place, threads));
  return launch_peer_kernel(p.place, peer_answer, blocks, threads, 0, stream, p,
                            static_cast<int>(items / rows), columns * element);
}

}  // namespace moesaic::cuda
