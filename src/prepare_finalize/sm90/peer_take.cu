#include <cuda_runtime.h>

#include "prepare_finalize/sm90/peer_await.cuh"

namespace moesaic::cuda {
namespace {

using parallel::PeerKind;

// Rows of a source that a block has: scales, which lie row by row in the window, are written in lines.
constexpr int kTileRows = 16, kTakeThreads = 256, kTakeWarps = kTakeThreads / 32;

// One block per tile of rows of a source.
__global__ void __launch_bounds__(kTakeThreads)
    peer_take(const __grid_constant__ PeerTakeParams p, bool waits) {
  extern __shared__ float scales[];  // [groups][kTileRows + 1]
  __shared__ NearOwners near;
  __shared__ std::int32_t live[parallel::kPeerWindowRanks];
  touch_params(p);
  load_owners(p.routing, near);
  if (!waits) begin_peer_kernel();
  const PeerPlace& place = p.place;
  const parallel::PeerLayout& layout = place.layout;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto top_k = static_cast<int>(layout.shape.top_k);
  const bool there_are_words = await_words(place, PeerKind::kRows, epoch_of_rows(place), live);
  if (waits) begin_peer_kernel();
  if (blockIdx.x == 0 && there_are_words && thread < layout.shape.ranks) {
    place.live[thread] = live[thread];
  }
  std::int64_t reach = layout.shape.tokens;
  if (!p.all_ids && there_are_words) reach = most_live(place, live);
  const std::int64_t tiles_of_source = (reach + kTileRows - 1) / kTileRows;
  const std::int64_t tiles = layout.shape.ranks * tiles_of_source;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t source = tile / tiles_of_source;
    const std::int64_t first = (tile - source * tiles_of_source) * kTileRows;
    const std::int64_t left = layout.shape.tokens - first;
    const int rows = left < kTileRows ? static_cast<int>(left) : kTileRows;
    std::int64_t arrived = there_are_words ? live[source] - first : 0;
    MOESAIC_CUDA_FAULT(cuda_peer_rows_of_the_call_before_stay, if (there_are_words) arrived = rows;)
    const std::int64_t to = source * layout.shape.tokens + first;
    const std::byte* const window = own(place);
    const auto* const ids =
        reinterpret_cast<const std::int32_t*>(window + layout.id(source, first));
    const auto* const weights =
        reinterpret_cast<const float*>(window + layout.weight(source, first));
    // Also of rows that are not there: asked for at once.
    std::int32_t id = thread < rows * top_k ? ids[thread] : -1;
    float weight = thread < rows * top_k ? weights[thread] : 0.0F;
    const std::byte* const of_rows = window + layout.scale(source, first);
    constexpr int kAtOnce = 4;
    for (int e0 = thread; e0 < rows * p.groups; e0 += kAtOnce * kTakeThreads) {
      float v[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int e = e0 + u * kTakeThreads, r = e / p.groups;
        if (r >= rows) break;
        v[u] = reinterpret_cast<const float*>(of_rows + r * layout.scale_pitch)[e - r * p.groups];
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int e = e0 + u * kTakeThreads, r = e / p.groups;
        if (r < rows) scales[(e - r * p.groups) * (kTileRows + 1) + r] = v[u];
      }
    }
    for (int i = thread; i < rows * top_k; i += kTakeThreads) {
      if (i >= kTakeThreads) {
        id = ids[i];
        weight = weights[i];
      }
      p.ids[to * top_k + i] = i / top_k < arrived ? id : -1;
      p.weights[to * top_k + i] = weight;
    }
    __syncthreads();
    for (int e = thread; e < kTileRows * p.groups; e += kTakeThreads) {
      const int g = e / kTileRows, r = e % kTileRows;
      if (r < rows) p.scale[g * p.scale_stride + to + r] = scales[g * (kTileRows + 1) + r];
    }
    const int lane = thread % 32;
    if (p.rows != nullptr) {
      for (int r = thread / 32; r < rows && r < arrived; r += kTakeWarps) {
        bool here = p.routing.owner == nullptr;
        for (int j = lane; j < top_k && !here; j += 32) {
          here = owner_of(p.routing, near, ids[r * top_k + j]) == place.rank;
        }
        if (__any_sync(kWholeWarp, here) == 0) continue;
        copy_by_warp(p.rows + (to + r) * p.row_bytes, window + layout.row(source, first + r),
                     p.row_bytes / 16);
      }
    }
    __syncthreads();
  }
}

}  // namespace

int launch_peer_take(const PeerTakeParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const parallel::PeerShape& shape = p.place.layout.shape;
  const std::int64_t rows = p.all_ids ? shape.tokens : likely_rows(p.place, p.likely_tokens);
  const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const unsigned blocks = peer_blocks(shape.ranks * tiles, most_blocks(p.place, kTakeThreads));
  const bool waits = may_wait(p.place, blocks);
  if (!waits) {
    if (const int error = launch_peer_wait(p.place, PeerKind::kRows, stream)) return error;
  }
  return launch_peer_kernel(p.place, peer_take, blocks, kTakeThreads,
                            static_cast<std::size_t>(p.groups) * (kTileRows + 1) * sizeof(float),
                            stream, p, waits);
}

}  // namespace moesaic::cuda
