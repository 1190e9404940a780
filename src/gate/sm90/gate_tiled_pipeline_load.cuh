// The pipeline of gate_tiled_pipeline.cu: tiles, their place in shared memory, and the warpgroup
// that loads them.
#pragma once

#include <cstdint>

#include "gate/sm90/gate_mma.cuh"

namespace moesaic::cuda::gate_tiled {

inline constexpr int kChunk = 64;  // elements of K per stage: rows of 128 bytes
inline constexpr int kLoaders = 128, kMultipliers = 256;
inline constexpr int kConsumerWarps = kMultipliers / 32;

// Of bf16 or F16: tokens by experts of a block, and the blocks that share its K. Shared memory: the ring, which the
// sums of the groups replace in the end, then barriers (full, empty) of each stage.
template <class OfElement, int Tokens, int Experts, int Cluster>
struct Tile {
  using Element = OfElement;
  static constexpr int kTokens = Tokens, kExperts = Experts, kCluster = Cluster;
  static constexpr int kGroups = kGateGroups / Cluster;  // of a block
  // Of a warpgroup: 64 tokens and all experts, or all tokens and half of the experts.
  static constexpr bool kSplitTokens = Tokens == 128;
  static constexpr int kColumns = kSplitTokens ? Experts : Experts / 2;
  static constexpr int kRegisters = kColumns / 2;
  static constexpr int kStageBytes = (Tokens + Experts) * 128;
  static constexpr int kStages = 196608 / kStageBytes;
  static constexpr int kRing = kStages * kStageBytes;
  static constexpr int kSumPitch = Experts + 8;  // stores of two floats meet no bank twice
  static constexpr int kBytes = kRing + kStages * 16;
  static_assert(Tokens == 64 || kSplitTokens);
  static_assert(Cluster == 1 || kGroups * Tokens * kSumPitch * 4 <= kRing);
  static_assert(kBytes <= kGateSharedLimit);
};

struct Place {
  std::uint32_t ring = 0;
  int rank = 0;   // in the cluster
  int steps = 0;  // of a slice, and chunks of a group: four slices of steps, four steps a chunk
  std::int64_t first_token = 0, first_expert = 0;
};

template <class T>
__device__ __forceinline__ std::uint32_t full(const Place& at, int stage) {
  return at.ring + static_cast<std::uint32_t>(T::kRing + stage * 16);
}
template <class T>
__device__ __forceinline__ std::uint32_t empty(const Place& at, int stage) {
  return full<T>(at, stage) + 8;
}

// A thread's part of loading chunks of kRows rows of a matrix: 16 bytes of every 16th row, swizzled
// by the row. Pieces outside the matrix become zeros; kAgain: the rows are read again for each part
// of the weights. The loop has few instructions, as one loading warp per scheduler runs them.
template <int kRows, bool kAgain>
struct RowLoader {
  static constexpr int kStep = kLoaders / 8, kCount = kRows / kStep;
  const std::uint16_t* from = nullptr;  // the thread's piece of the next chunk of its first row
  std::int64_t stride = 0;              // between its rows
  int there = 0;                        // of its rows, those inside the matrix
  int left = 0;                         // elements from its piece to the end of a row
  int before_end = 0;                   // of x: to the end of what is read again
  std::uint32_t to = 0;                 // in a stage

  __device__ RowLoader(const GateParams& p, std::int64_t first, int k) {
    const int thread = static_cast<int>(threadIdx.x) - kMultipliers;
    const int row = thread / 8, piece = thread % 8;
    const std::int64_t rows = kAgain ? p.tokens : p.experts;
    const int length = kAgain ? p.hidden : p.depth();
    k += piece * 8;
    const int column = kAgain ? p.column(k) : k;
    from = static_cast<const std::uint16_t*>(kAgain ? p.x : p.weight) + (first + row) * length +
           column;
    stride = static_cast<std::int64_t>(kStep) * length;
    before_end = length - column;
    const std::int64_t behind = rows - first - row;
    there = behind <= 0 ? 0
                        : static_cast<int>(
                              min((behind + kStep - 1) / kStep, static_cast<std::int64_t>(kCount)));
    left = p.depth() - k;
    to = static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
  }
  __device__ __forceinline__ void load(std::uint32_t stage, int length) {
    const std::uint16_t* at = from;
    const int count = left > 0 ? there : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::async_load_16(stage + to + static_cast<std::uint32_t>(i * kStep * 128), at, i < count);
      at += stride;
    }
    from += kChunk;
    left -= kChunk;
    if (!kAgain) return;
    before_end -= kChunk;
    if (before_end > 0) return;
    from -= length;
    before_end += length;
  }
};

template <class T>
__device__ __forceinline__ void load_tile(const GateParams& p, const Place& at) {
  const int chunks = at.steps * T::kGroups, first = at.rank * chunks * kChunk;
  RowLoader<T::kExperts, false> weight(p, at.first_expert, first);
  RowLoader<T::kTokens, true> x(p, at.first_token, first);
  const auto load_weight = [&](int stage) {
    weight.load(at.ring + static_cast<std::uint32_t>(stage * T::kStageBytes + T::kTokens * 128),
                p.depth());
  };
  const auto load_x = [&](int stage) {
    x.load(at.ring + static_cast<std::uint32_t>(stage * T::kStageBytes), p.hidden);
    ptx::async_arrive(full<T>(at, stage));
  };
  // Weights do not depend on the kernels in front.
  const int early = min(chunks, T::kStages);
  for (int c = 0; c < early; ++c) load_weight(c);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  for (int c = 0; c < early; ++c) load_x(c);
  int stage = 0;
  std::uint32_t parity = 0;
  for (int c = early; c < chunks; ++c) {
    ptx::mbarrier_wait(empty<T>(at, stage), parity);
    load_weight(stage);
    load_x(stage);
    if (++stage < T::kStages) continue;
    stage = 0;
    parity ^= 1;
  }
  ptx::async_wait_all();
}

}  // namespace moesaic::cuda::gate_tiled
