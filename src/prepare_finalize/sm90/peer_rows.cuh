// What the kernels of peer_rows.h share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/system.cuh"
#include "prepare_finalize/sm90/peer_rows.h"

namespace moesaic::cuda {

inline constexpr int kPeerThreads = 256, kPeerWarps = kPeerThreads / 32;
inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;
// Which of PeerPlace::tickets.
enum PeerTicket { kSendTicket, kAnswerTicket, kSumTicket };

__device__ __forceinline__ std::byte* own(const PeerPlace& p) { return p.base[p.rank]; }
__device__ __forceinline__ parallel::PeerReport* abort_line(const PeerPlace& p) {
  return reinterpret_cast<parallel::PeerReport*>(own(p) +
                                                 p.layout.own_line(parallel::PeerOwnLine::kAbort));
}
// Whether a call ended with a report before this kernel began: an earlier kernel of this rank has told.
__device__ __forceinline__ bool has_ended(const PeerPlace& p) {
  return ptx::load_relaxed_system(&abort_line(p)->code) != 0;
}
// First in every kernel: what is in front on the stream is done, what is behind may be set up.
__device__ __forceinline__ void begin_peer_kernel() {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
}
// The same for all threads of a block, though a report may come at any time. All of them call it.
__device__ __forceinline__ bool block_has_ended(const PeerPlace& p) {
  __shared__ bool ended;
  if (threadIdx.x == 0) ended = has_ended(p);
  __syncthreads();
  return ended;
}
__device__ __forceinline__ std::uint32_t* epoch_line(const PeerPlace& p) {
  return reinterpret_cast<std::uint32_t*>(own(p) +
                                          p.layout.own_line(parallel::PeerOwnLine::kEpoch));
}
__device__ __forceinline__ std::uint32_t epoch_of_call(const PeerPlace& p) {
  return *epoch_line(p) + 1;
}

__device__ __forceinline__ bool names_expert(const PeerRouting& r, std::int32_t id) {
  return id >= 0 && id < r.num_experts;
}
// A bit for each rank that has an expert of the token, found by a warp together.
__device__ __forceinline__ unsigned ranks_of(const PeerPlace& p, const PeerRouting& r,
                                             const std::int32_t* ids) {
  if (r.owner == nullptr) return kWholeWarp >> (32 - static_cast<int>(p.layout.shape.ranks));
  unsigned ranks = 0;
  for (int j = static_cast<int>(threadIdx.x % 32); j < p.layout.shape.top_k; j += 32) {
    const std::int32_t id = ids[j];
    if (names_expert(r, id)) ranks |= 1U << r.owner[id];
  }
  return __reduce_or_sync(kWholeWarp, ranks);
}

// The last block to come here, whose threads then see what all blocks have stored. All threads of
// all blocks call it. What that block releases at system scope has the other blocks' stores before it.
__device__ __forceinline__ bool is_last_block(std::uint32_t* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1U) == gridDim.x - 1;
    if (last) {
      *ticket = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return last;
}

// After everything that all blocks have stored, the word of this call at every rank. epoch: that of the
// call, which was read when there was time.
__device__ __forceinline__ void publish(const PeerPlace& p, parallel::PeerKind kind,
                                        PeerTicket ticket, std::uint32_t epoch,
                                        std::uint32_t live) {
  if (!is_last_block(p.tickets + ticket)) return;
  const auto r = static_cast<int>(threadIdx.x);
  if (r >= p.layout.shape.ranks) return;
  MOESAIC_CUDA_FAULT(cuda_peer_word_has_the_epoch_before, --epoch;)
  MOESAIC_CUDA_FAULT(cuda_peer_word_of_one_reader_lost,
                     if (r == (p.rank + 1) % p.layout.shape.ranks) return;)
  MOESAIC_CUDA_FAULT(cuda_peer_live_rows_are_one_less, if (live > 0)-- live;)
  auto* const word = reinterpret_cast<std::uint64_t*>(p.base[r] + p.layout.word(kind, p.rank));
  ptx::store_release_system(word, parallel::pack_peer_word({epoch, live, p.signature}));
}

// Copies `count` pieces of 16 bytes, a warp together.
__device__ __forceinline__ void copy_by_warp(void* to, const void* from, std::int64_t count) {
  constexpr int kAtOnce = 4;
  const auto* const source = static_cast<const uint4*>(from);
  auto* const target = static_cast<uint4*>(to);
  for (std::int64_t i = threadIdx.x % 32; i < count; i += 32 * kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * 32 < count) v[u] = source[i + u * 32];
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (i + u * 32 < count) target[i + u * 32] = v[u];
    }
  }
}

// A row whose ids lie in the window or the arrays, by the warp that has it.
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

// At least one block: words are published whatever there is to do.
inline unsigned peer_blocks(const PeerPlace& p, std::int64_t count) {
  if (count < 1) return 1;
  return static_cast<unsigned>(count < p.max_blocks ? count : p.max_blocks);
}
// A kernel is set up while the one in front still runs, unless ranks share the device: blocks that only
// wait could keep the kernel away that another rank waits for.
template <class Kernel, class... Args>
int launch_peer_kernel(const PeerPlace& place, Kernel kernel, unsigned blocks, unsigned threads,
                       std::size_t shared_bytes, void* stream, const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = place.shares_device ? 0 : 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace moesaic::cuda
