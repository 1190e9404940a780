#include <cuda_runtime.h>

#include "cuda/quant_rows.cuh"
#include "prepare_finalize/sm90/peer_rows.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerKind;

// Sixteen bytes of a long part of a row for a thread, so many at once.
constexpr int kMostAtOnce = 4;

// A part of a row, as a block has it in registers.
template <int kAtOnce>
struct Part {
  uint4 v[kAtOnce];
};
// Pieces first to end of row t.
template <int kAtOnce>
__device__ __forceinline__ void load_part(const PeerSendParams& p, std::int64_t t, int pieces,
                                          int first, int end, Part<kAtOnce>& part) {
  const auto* const row = reinterpret_cast<const uint4*>(p.rows) + t * pieces;
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int i = first + u * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    part.v[u] = i < end ? row[i] : make_uint4(0, 0, 0, 0);
  }
}

// To the ranks of `needed`, at `to` of their windows: those behind this one first, so that no window is
// everybody's first.
template <class T>
__device__ __forceinline__ void store_at(const PeerPlace& place, unsigned needed, std::int64_t to,
                                         const T& value) {
  const auto ranks = static_cast<int>(place.layout.shape.ranks);
  int r = place.rank;
  for (int n = 0; n < ranks; ++n) {
    r = r + 1 == ranks ? 0 : r + 1;
    if ((needed >> r & 1) != 0) *reinterpret_cast<T*>(place.base[r] + to) = value;
  }
}

// The codes that a part of a row is rounded to on the way, and their scales. scales: of the row, in
// shared memory.
template <int kAtOnce>
__device__ __forceinline__ void send_codes(const PeerSendParams& p, std::int64_t t, unsigned needed,
                                           const Part<kAtOnce>& part, int first, int end,
                                           std::int64_t to, std::int64_t scale_to, float* scales) {
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const float* const weight = p.weight_on_input ? p.weights + t : nullptr;
  // All lanes of a warp stay together: the last pass has some without a column.
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (first + u * threads >= end) break;
    const int i = first + u * threads + thread;
    float f[8];
    eight_values(part.v[u], weight, f);
    const GroupCodes made = group_codes(f, p.power_of_two_scales);
    if (i >= end) continue;
    if (thread % 16 == 0) scales[i / 16] = made.scale;
    store_at(p.place, needed, to + i * 8, made.codes);
  }
  __syncthreads();
  for (int g = first / 16 + thread; g < end / 16; g += threads) {
    int from = g;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_have_the_scale_of_a_neighbour,
                       from = g > first / 16 ? g - 1 : g;)
    store_at(p.place, needed, scale_to + g * 4, scales[from]);
  }
  __syncthreads();
}

// One block per part of `span` pieces of a token's row.
template <bool kCodes, int kAtOnce>
__global__ void __launch_bounds__(kPeerThreads, 2)
    peer_send(const __grid_constant__ PeerSendParams p, int parts, int span, int pieces) {
  extern __shared__ float scales[];
  __shared__ NearOwners near;
  touch_params(p);
  load_owners(p.routing, near);
  begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const auto ranks = static_cast<int>(layout.shape.ranks);
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int64_t items = p.tokens * parts;
  // All that is read at first is asked for at once.
  const bool told = thread == 0 && has_ended(place);
  const std::uint32_t epoch = epoch_of_rows(place);
  std::int64_t item = blockIdx.x;
  Part<kAtOnce> part = {};
  std::int32_t id = -1;
  float weight = 0.0F;
  std::int64_t t = 0;
  int first = 0, end = 0;
  const auto load = [&] {
    t = item / parts;
    first = static_cast<int>(item - t * parts) * span;
    end = pieces - first < span ? pieces : first + span;
    load_part(p, t, pieces, first, end, part);
    // A warp has the ids together, each of them all.
    const int j = thread % 32;
    id = j < top_k ? p.routing.ids[t * top_k + j] : -1;
    weight = j < top_k ? p.weights[t * top_k + j] : 0.0F;
  };
  if (item < items) load();
  if (__syncthreads_or(told ? 1 : 0) != 0) return;
  if (blockIdx.x == 0 && thread == 0) {
    *own_counter(place, parallel::PeerOwnLine::kCall) = epoch;
  }
  while (item < items) {
    unsigned needed = kWholeWarp >> (32 - ranks);
    if (p.routing.owner != nullptr) {
      unsigned mine = 0;
      for (int j = thread % 32; j < top_k; j += 32) {
        const int owner = owner_of(p.routing, near, j < 32 ? id : p.routing.ids[t * top_k + j]);
        if (owner >= 0) mine |= 1U << owner;
      }
      needed = __reduce_or_sync(kWholeWarp, mine);
    }
    if (first == 0) {
      if (thread == 0) place.sent_to[t] = needed;
      MOESAIC_CUDA_FAULT(cuda_peer_rows_lose_weights, weight = 1.0F;)
      // Warp w has rank w, or some of the ranks in turn.
      for (int r = thread / 32; r < ranks; r += static_cast<int>(blockDim.x / 32)) {
        auto* const ids = reinterpret_cast<std::int32_t*>(place.base[r] + layout.id(place.rank, t));
        auto* const weights =
            reinterpret_cast<float*>(place.base[r] + layout.weight(place.rank, t));
        for (int j = thread % 32; j < top_k; j += 32) {
          ids[j] = j < 32 ? id : p.routing.ids[t * top_k + j];
          weights[j] = j < 32 ? weight : p.weights[t * top_k + j];
        }
      }
    }
    std::int64_t slot = t;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_go_to_another_slot, if (t > 0) slot = t - 1;)
    const std::int64_t to = layout.row(place.rank, slot);
    if constexpr (kCodes) {
      send_codes(p, t, needed, part, first, end, to, layout.scale(place.rank, slot), scales);
    } else {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = first + u * static_cast<int>(blockDim.x) + thread;
        if (i < end) store_at(place, needed, to + i * 16, part.v[u]);
      }
    }
    item += gridDim.x;
    if (item < items) load();
  }
  publish(place, PeerKind::kRows, kSendTicket, epoch, static_cast<std::uint32_t>(p.tokens));
}

}  // namespace

int launch_peer_send(const PeerSendParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  // Of 16 bytes of what is read.
  const std::int64_t pieces = p.groups > 0 ? std::int64_t{p.groups} * 16 : p.row_bytes / 16;
  const unsigned threads = pieces > kPeerFewThreads ? kPeerThreads : kPeerFewThreads;
  // Parts of rows are small where there are few, else as large as they can be.
  std::int64_t span = threads, parts = (pieces + span - 1) / span;
  std::int64_t most = parallel::kPeerWordCopies;
  if (p.tokens * parts > kPeerFew) {
    span *= kMostAtOnce;
    parts = (pieces + span - 1) / span;
    most = most_blocks(p.place, threads);
  }
  const unsigned blocks = peer_blocks(p.tokens * parts, most);
  const bool few = span == threads, codes = p.groups > 0;
  const auto kernel = few ? (codes ? peer_send<true, 1> : peer_send<false, 1>)
                          : (codes ? peer_send<true, kMostAtOnce> : peer_send<false, kMostAtOnce>);
  return launch_peer_kernel(
      p.place, kernel, blocks, threads, static_cast<std::size_t>(p.groups) * sizeof(float), stream,
      p, static_cast<int>(parts), static_cast<int>(span), static_cast<int>(pieces));
}

}  // namespace moesaic::cuda
