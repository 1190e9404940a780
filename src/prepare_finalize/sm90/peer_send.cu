#include <cuda_runtime.h>

#include "cuda/quant_rows.cuh"
#include "prepare_finalize/sm90/peer_rows.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerKind;

// A row as it is to the ranks of `needed`, at `to` of their windows, by a block.
__device__ __forceinline__ void send_row(const PeerSendParams& p, std::int64_t t, unsigned needed,
                                         std::int64_t to) {
  const PeerPlace& place = p.place;
  const auto ranks = static_cast<int>(place.layout.shape.ranks);
  constexpr int kAtOnce = 4;
  const auto* const row = reinterpret_cast<const uint4*>(p.rows + t * p.row_bytes);
  const auto pieces = static_cast<int>(p.row_bytes / 16);
  for (int begin = static_cast<int>(threadIdx.x); begin < pieces; begin += kAtOnce * kPeerThreads) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (begin + u * kPeerThreads < pieces) v[u] = row[begin + u * kPeerThreads];
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = begin + u * kPeerThreads;
      if (i >= pieces) break;
      // The ranks behind this one first, so that no window is everybody's first.
      for (int n = 1; n <= ranks; ++n) {
        const int r = (place.rank + n) % ranks;
        if ((needed >> r & 1) != 0) *reinterpret_cast<uint4*>(place.base[r] + to + i * 16) = v[u];
      }
    }
  }
}

// The same for the codes that a row is rounded to on the way; its scales go to `scale_to`. scales:
// [groups] in shared memory.
__device__ __forceinline__ void send_codes(const PeerSendParams& p, std::int64_t t, unsigned needed,
                                           std::int64_t to, std::int64_t scale_to, float* scales) {
  constexpr int kAtOnce = 4, kPass = kPeerThreads * 8;
  const PeerPlace& place = p.place;
  const auto ranks = static_cast<int>(place.layout.shape.ranks);
  const auto thread = static_cast<int>(threadIdx.x);
  const int columns = p.groups * 128;
  const auto* const row = reinterpret_cast<const uint4*>(p.rows + t * columns * 2);
  const float* const weight = p.weight_on_input ? p.weights + t : nullptr;
  // All lanes of a warp stay together: the last pass has some without a column.
  for (int begin = 0; begin < columns; begin += kAtOnce * kPass) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int column = begin + u * kPass + thread * 8;
      v[u] = column < columns ? row[column / 8] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (begin + u * kPass >= columns) break;
      const int column = begin + u * kPass + thread * 8;
      float f[8];
      eight_values(v[u], weight, f);
      const GroupCodes made = group_codes(f, p.power_of_two_scales);
      if (column >= columns) continue;
      if (thread % 16 == 0) scales[column / 128] = made.scale;
      for (int n = 1; n <= ranks; ++n) {
        const int r = (place.rank + n) % ranks;
        if ((needed >> r & 1) != 0) {
          *reinterpret_cast<uint2*>(place.base[r] + to + column) = made.codes;
        }
      }
    }
  }
  __syncthreads();
  for (int g = thread; g < p.groups; g += kPeerThreads) {
    int from = g;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_have_the_scale_of_a_neighbour, from = g > 0 ? g - 1 : g;)
    for (int r = 0; r < ranks; ++r) {
      if ((needed >> r & 1) != 0) {
        reinterpret_cast<float*>(place.base[r] + scale_to)[g] = scales[from];
      }
    }
  }
  __syncthreads();
}

// One block per token and pass.
template <bool kCodes>
__global__ void __launch_bounds__(kPeerThreads, 4)
    peer_send(const __grid_constant__ PeerSendParams p) {
  extern __shared__ float scales[];
  begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const std::uint32_t epoch = epoch_of_call(place);
  if (block_has_ended(place)) return;
  const auto ranks = static_cast<int>(layout.shape.ranks);
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto thread = static_cast<int>(threadIdx.x);
  for (std::int64_t t = blockIdx.x; t < p.tokens; t += gridDim.x) {
    const std::int32_t* const ids = p.routing.ids + t * top_k;
    const unsigned needed = ranks_of(place, p.routing, ids);
    if (thread == 0) place.sent_to[t] = needed;
    for (int i = thread; i < ranks * top_k; i += kPeerThreads) {
      const int r = i / top_k, j = i % top_k;
      std::byte* const window = place.base[r];
      reinterpret_cast<std::int32_t*>(window + layout.id(place.rank, t))[j] = ids[j];
      float weight = p.weights[t * top_k + j];
      MOESAIC_CUDA_FAULT(cuda_peer_rows_lose_weights, weight = 1.0F;)
      reinterpret_cast<float*>(window + layout.weight(place.rank, t))[j] = weight;
    }
    std::int64_t slot = t;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_go_to_another_slot, if (t > 0) slot = t - 1;)
    const std::int64_t to = layout.row(place.rank, slot);
    if constexpr (kCodes) {
      send_codes(p, t, needed, to, layout.scale(place.rank, slot), scales);
    } else {
      send_row(p, t, needed, to);
    }
  }
  publish(place, PeerKind::kRows, kSendTicket, epoch, static_cast<std::uint32_t>(p.tokens));
}

// One warp per row.
__global__ void __launch_bounds__(kPeerThreads, 4)
    peer_take(const __grid_constant__ PeerTakeParams p) {
  begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const bool told = has_ended(place);
  const std::int64_t rows = layout.shape.ranks * layout.shape.tokens;
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kPeerWarps + threadIdx.x / 32;
       i < rows; i += static_cast<std::int64_t>(gridDim.x) * kPeerWarps) {
    const ArrivedRow at = arrived_row(place, i);
    const std::byte* const window = own(place);
    const auto* const ids =
        reinterpret_cast<const std::int32_t*>(window + layout.id(at.source, at.token));
    const auto* const weights =
        reinterpret_cast<const float*>(window + layout.weight(at.source, at.token));
    const auto* const scales =
        reinterpret_cast<const float*>(window + layout.scale(at.source, at.token));
    // All is asked for at once, also of rows that are not there or have no expert here.
    std::int32_t id = lane < top_k ? ids[lane] : -1;
    float weight = lane < top_k ? weights[lane] : 0.0F;
    const std::int32_t live = place.live[at.source];
    const bool ended = __any_sync(kWholeWarp, told) != 0;
    bool there = !ended && at.token < live;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_of_the_call_before_stay, there = !ended;)
    for (int j = lane; j < top_k; j += 32) {
      if (j >= 32) {
        id = ids[j];
        weight = weights[j];
      }
      p.ids[at.row * top_k + j] = there ? id : -1;
      p.weights[at.row * top_k + j] = weight;
    }
    for (int g = lane; g < p.groups; g += 32) p.scale[g * p.scale_stride + at.row] = scales[g];
    if (p.rows != nullptr && there && (ranks_of(place, p.routing, ids) >> place.rank & 1) != 0) {
      copy_by_warp(p.rows + at.row * p.row_bytes, window + layout.row(at.source, at.token),
                   p.row_bytes / 16);
    }
  }
}

}  // namespace

int launch_peer_send(const PeerSendParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const unsigned blocks = peer_blocks(p.place, p.tokens);
  if (p.groups == 0) {
    return launch_peer_kernel(p.place, peer_send<false>, blocks, kPeerThreads, 0, stream, p);
  }
  return launch_peer_kernel(p.place, peer_send<true>, blocks, kPeerThreads,
                            static_cast<std::size_t>(p.groups) * sizeof(float), stream, p);
}

int launch_peer_take(const PeerTakeParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t rows = p.place.layout.shape.ranks * p.place.layout.shape.tokens;
  return launch_peer_kernel(p.place, peer_take,
                            peer_blocks(p.place, (rows + kPeerWarps - 1) / kPeerWarps),
                            kPeerThreads, 0, stream, p);
}

}  // namespace moesaic::cuda
