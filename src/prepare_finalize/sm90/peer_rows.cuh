// What the kernels of peer_rows.h share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/system.cuh"
#include "prepare_finalize/sm90/peer_rows.h"

namespace moesaic::cuda {

// Of a block; fewer where a row gives no more than half of them something to do.
inline constexpr int kPeerThreads = 512, kPeerFewThreads = 256;
inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;
// Which of PeerPlace::tickets.
enum PeerTicket { kSendTicket, kAnswerTicket };

__device__ __forceinline__ std::byte* own(const PeerPlace& p) { return p.base[p.rank]; }
__device__ __forceinline__ parallel::PeerReport* abort_line(const PeerPlace& p) {
  return reinterpret_cast<parallel::PeerReport*>(own(p) +
                                                 p.layout.own_line(parallel::PeerOwnLine::kAbort));
}
// Whether a call ended with a report before this kernel began: an earlier kernel of this rank has told.
__device__ __forceinline__ bool has_ended(const PeerPlace& p) {
  return ptx::load_relaxed_system(&abort_line(p)->code) != 0;
}

// Owners of experts, where a block has them at hand.
inline constexpr int kPeerNearExperts = 1024;
struct NearOwners {
  std::uint8_t rank[kPeerNearExperts];
};
// First in every kernel: what is in front on the stream is done, what is behind may be set up. So a
// kernel that has begun knows that all before the one in front of it is done.
__device__ __forceinline__ void begin_peer_kernel() {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
}
// Before that: a kernel's parameters are not at hand when it begins, and what is asked for while the one
// in front still runs costs nothing.
template <class Params>
__device__ __forceinline__ void touch_params(const Params& p) {
  constexpr int kWords = static_cast<int>(sizeof(Params) / 4);
  const auto* const words = reinterpret_cast<const std::uint32_t*>(&p);
  for (int i = static_cast<int>(threadIdx.x) * 8; i < kWords;
       i += static_cast<int>(blockDim.x) * 8) {
    asm volatile("" ::"r"(words[i]));
  }
}
// Before that, since owners never change; to be read after the next barrier.
__device__ __forceinline__ void load_owners(const PeerRouting& r, NearOwners& near) {
  if (r.owner != nullptr && r.num_experts <= kPeerNearExperts) {
    for (int e = static_cast<int>(threadIdx.x); e < r.num_experts;
         e += static_cast<int>(blockDim.x)) {
      near.rank[e] = static_cast<std::uint8_t>(r.owner[e]);
    }
  }
}
// The rank that has expert `id`, or -1: there is no such expert. Not for gather.
__device__ __forceinline__ int owner_of(const PeerRouting& r, const NearOwners& near,
                                        std::int32_t id) {
  if (id < 0 || id >= r.num_experts) return -1;
  return r.num_experts <= kPeerNearExperts ? near.rank[id] : r.owner[id];
}

__device__ __forceinline__ std::uint32_t* own_counter(const PeerPlace& p,
                                                      parallel::PeerOwnLine line) {
  return reinterpret_cast<std::uint32_t*>(own(p) + p.layout.own_line(line));
}
// The epoch of the call, before its answers are sent and from then on. Between kernels these are the
// same: a counter moves on in the one of the two phases that does not read it.
__device__ __forceinline__ std::uint32_t epoch_of_rows(const PeerPlace& p) {
  return *own_counter(p, parallel::PeerOwnLine::kEpoch) + 1;
}
__device__ __forceinline__ std::uint32_t epoch_of_answers(const PeerPlace& p) {
  return *own_counter(p, parallel::PeerOwnLine::kCall);
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

// After everything that all blocks have stored, the copies of this call's word at every rank: of few
// blocks each its own copies, of many the last one all. epoch: that of the call, which was read when
// there was time. All threads of all blocks call it.
__device__ __forceinline__ void publish(const PeerPlace& p, parallel::PeerKind kind,
                                        PeerTicket ticket, std::uint32_t epoch,
                                        std::uint32_t live) {
  constexpr auto kCopies = static_cast<unsigned>(parallel::kPeerWordCopies);
  unsigned first = 0, step = 1;
  if (gridDim.x <= kCopies) {
    __syncthreads();
    first = blockIdx.x;
    step = gridDim.x;
  } else if (!is_last_block(p.tickets + ticket)) {
    return;
  }
  MOESAIC_CUDA_FAULT(cuda_peer_word_has_the_epoch_before, --epoch;)
  MOESAIC_CUDA_FAULT(cuda_peer_live_rows_are_one_less, if (live > 0)-- live;)
  const std::uint64_t word = parallel::pack_peer_word({epoch, live, p.signature});
  const auto ranks = static_cast<unsigned>(p.layout.shape.ranks);
  for (unsigned i = threadIdx.x; i / ranks * step + first < kCopies; i += blockDim.x) {
    const int r = static_cast<int>(i % ranks);
    MOESAIC_CUDA_FAULT(cuda_peer_word_of_one_reader_lost,
                       if (r == (p.rank + 1) % static_cast<int>(ranks)) continue;)
    ptx::store_release_system(
        reinterpret_cast<std::uint64_t*>(
            p.base[r] + p.layout.word(kind, p.rank, static_cast<int>(i / ranks * step + first))),
        word);
  }
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

// Most rows of a rank in this call, found by a warp.
__device__ __forceinline__ std::int32_t most_live(const PeerPlace& p, const std::int32_t* live) {
  const auto r = static_cast<int>(threadIdx.x % 32);
  return static_cast<std::int32_t>(__reduce_max_sync(
      kWholeWarp, r < p.layout.shape.ranks ? static_cast<unsigned>(live[r]) : 0U));
}
// Rows of a rank that a grid is made for: no more than it may send.
inline std::int64_t likely_rows(const PeerPlace& p, std::int64_t likely) {
  return likely > 0 && likely < p.layout.shape.tokens ? likely : p.layout.shape.tokens;
}

// At least one block: words are published whatever there is to do.
inline unsigned peer_blocks(std::int64_t count, std::int64_t most) {
  return static_cast<unsigned>(count < 1 ? 1 : count < most ? count : most);
}
inline std::int64_t most_blocks(const PeerPlace& p, unsigned threads) {
  return std::int64_t{p.max_blocks} * kPeerThreads / threads;
}
// Work for a block of a call of few rows, whose kernels have a block for each copy of a word.
inline constexpr std::int64_t kPeerFew = 8 * parallel::kPeerWordCopies;
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

// Whether so many blocks may wait for words by themselves, from before what is in front is done: those
// that wait leave most SMs to other kernels, for one of which another rank may be waiting.
inline bool may_wait(const PeerPlace& p, unsigned blocks) {
  return !p.shares_device && blocks <= static_cast<unsigned>(p.most_waiting);
}

}  // namespace moesaic::cuda
