// The gate for 17 to 128 tokens (gate_mma.cuh has the arithmetic): as in gate_one_wave.cu a block
// has one group of four slices and a cluster all eight, but 32 experts, whose rows stay in shared
// memory while the tokens pass through it, 32 at a time. Rows come as bulk copies.
#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/once_per_device.h"
#include "gate/sm90/gate_clusters.cuh"
#include "gate/sm90/gate_mma.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kRankTokens = kResidentTokens / kGateGroups;  // of each block of a cluster
constexpr int kBuffers = 2;

constexpr int kExperts = kResidentExperts, kTokens = kResidentTileTokens;
constexpr int kThreads =
    32 * kGateSlicesOfGroup * kExperts / 16;  // a warp per slice and 16 experts
constexpr int kSumPitch = kExperts + 4;

// Shared memory: barriers (of the weights and of each buffer), sums received from the cluster, sums
// of the slices, rows.
constexpr int kReceived = 64;
constexpr int kSums = kReceived + kResidentTokens * kExperts * 4;
constexpr int kWeights = kSums + kGateSlicesOfGroup * kTokens * kSumPitch * 4;
static_assert(kWeights == kResidentFixedBytes);

template <int Steps, bool kHalf>
__global__ void __launch_bounds__(kThreads, 1)
    gate_resident_weights(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(128) char shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int slice = warp & 3, expert_tile = warp >> 2;
  const int rank = static_cast<int>(ptx::cluster_cta_rank());
  const int steps = Steps > 0 ? Steps : gate_slice_steps(p.depth());
  const int group_elements = steps * 16 * kGateSlicesOfGroup;
  const auto pitch = static_cast<std::uint32_t>(gate_row_pitch(steps * kGateSlicesOfGroup));
  const int k = rank * group_elements;
  // Elements of the group's part of a row that lie inside the row.
  const int left_k = min(max(p.depth() - k, 0), group_elements);
  const auto row_bytes = static_cast<std::uint32_t>(left_k) * 2;
  const int first_expert = static_cast<int>(blockIdx.x / kGateGroups) * kExperts;
  const int tokens = static_cast<int>(p.tokens);
  // Blocks of one line of the grid have neighbouring tiles.
  const int tiles = (tokens + kTokens - 1) / kTokens, lines = static_cast<int>(gridDim.y);
  const int line_tiles = (tiles + lines - 1) / lines;
  const int first_tile = static_cast<int>(blockIdx.y) * line_tiles;
  const int end_tile = min(first_tile + line_tiles, tiles);
  auto* const received = reinterpret_cast<float*>(shared + kReceived);
  auto* const sums = reinterpret_cast<float*>(shared + kSums);
  const std::uint32_t weights = base + kWeights;
  const auto buffer = [&](int b) {
    return weights + static_cast<std::uint32_t>(kExperts + b * kTokens) * pitch;
  };
  const auto bar = [&](int i) { return base + static_cast<std::uint32_t>(i) * 8; };

  if (threadIdx.x == 0) {
    for (int i = 0; i <= kBuffers; ++i) ptx::mbarrier_init(bar(i), 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_arrive_relaxed();
  __syncthreads();
  const std::uint64_t policy = ptx::l2_evict_normal_policy();
  // By one warp: the rows of a matrix, so long, from `first` on, at most `most`, and of each from
  // `column` on: to the end, and again from the beginning. Where the matrix has fewer rows, the rest
  // of the buffer keeps old values, which only reach logits that nobody stores.
  const auto request = [&](const void* matrix, int first, int rows, int length, int column,
                           int most, std::uint32_t to, std::uint32_t barrier) {
    const int count = min(rows - first, most);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(barrier, static_cast<std::uint32_t>(count) * row_bytes);
    }
    __syncwarp();
    for (int row = lane; row < count && row_bytes > 0; row += 32) {
      const auto* const from = static_cast<const std::uint16_t*>(matrix) +
                               static_cast<std::int64_t>(first + row) * length;
      const std::uint32_t at = to + static_cast<std::uint32_t>(row) * pitch;
      const auto bytes = min(static_cast<std::uint32_t>(length - column) * 2, row_bytes);
      ptx::bulk_load(at, from + column, bytes, barrier, policy);
      if (bytes < row_bytes) ptx::bulk_load(at + bytes, from, row_bytes - bytes, barrier, policy);
    }
  };
  const auto request_tile = [&](int tile, int b) {
    request(p.x, tile * kTokens, tokens, p.hidden, p.column(k), kTokens, buffer(b), bar(1 + b));
  };
  if (warp == 0) {
    request(p.weight, first_expert, p.experts, p.depth(), k, kExperts, weights, bar(0));
  }
  // Zeros behind the end of the rows, in all buffers.
  const int pieces = (group_elements - left_k) / 8;
  for (int i = static_cast<int>(threadIdx.x); i < pieces * (kExperts + kBuffers * kTokens);
       i += kThreads) {
    const int row = i / pieces, piece = i % pieces;
    *reinterpret_cast<uint4*>(shared + kWeights + static_cast<std::uint32_t>(row) * pitch +
                              row_bytes + static_cast<std::uint32_t>(piece) * 16) =
        make_uint4(0, 0, 0, 0);
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (warp == 0) {
    for (int t = 0; t < kBuffers && first_tile + t < end_tile; ++t) {
      request_tile(first_tile + t, t);
    }
  }
  __syncthreads();  // the zeros are there
  ptx::mbarrier_wait(bar(0), 0);
  const std::uint32_t slice_at = static_cast<std::uint32_t>(slice * steps) * 32;
  const std::uint32_t experts = weights + static_cast<std::uint32_t>(expert_tile * 16) * pitch;
  for (int t = first_tile; t < end_tile; ++t) {
    const int turn = t - first_tile, b = turn % kBuffers, left = min(tokens - t * kTokens, kTokens);
    ptx::mbarrier_wait(bar(1 + b), static_cast<std::uint32_t>(turn / kBuffers) & 1);
    float part[kTokens / 8][4];
    multiply_slice<kHalf, kTokens>(experts + slice_at, buffer(b) + slice_at, pitch, steps, left,
                                   part);
    __syncthreads();  // the buffer and the sums are free
    if (warp == 0 && t + kBuffers < end_tile) {
      request_tile(t + kBuffers, b);
    }
    store_part<kTokens>(sums + slice * kTokens * kSumPitch, kSumPitch, expert_tile * 16, part);
    __syncthreads();
    if (turn == 0) ptx::cluster_wait();  // every block runs, so its memory may be written
    // Token i belongs to rank i % 8.
    for (int i = static_cast<int>(threadIdx.x); i < left * (kExperts / 4); i += kThreads) {
      const int token = i / (kExperts / 4), e = i % (kExperts / 4) * 4, all = t * kTokens + token;
      float sum[4];
      sum_of_slices(sums + token * kSumPitch + e, kTokens * kSumPitch, sum);
      const float* const to = received + (rank * kRankTokens + all / kGateGroups) * kExperts + e;
      const auto owner = static_cast<std::uint32_t>(all % kGateGroups);
      ptx::store_remote(ptx::shared_address(to), owner, sum);
    }
  }
  ptx::cluster_sync();
  for (int i = static_cast<int>(threadIdx.x); i < kRankTokens * kExperts; i += kThreads) {
    const int token = i / kExperts * kGateGroups + rank;
    if (token / kTokens < first_tile) continue;
    if (token / kTokens >= end_tile) break;
    if (token >= tokens) break;
    store_logit(p, first_expert + i % kExperts, token,
                sum_of_groups(received + i, kRankTokens * kExperts));
  }
}

template <int Steps, bool kHalf = false>
cudaError_t launch(const GateParams& p, const DeviceTraits& device, void* stream) {
  static OncePerDevice once;
  const cudaError_t prepared =
      once([] { return allow_all_shared_memory(gate_resident_weights<Steps, kHalf>); });
  if (prepared != cudaSuccess) return prepared;
  return launch_gate_clusters(
      gate_resident_weights<Steps, kHalf>, p, kGateGroups, (p.experts + kExperts - 1) / kExperts,
      resident_weights_lines(p, device), kThreads, resident_weights_bytes(p.depth()), stream);
}

}  // namespace

int launch_gate_resident_weights(const GateParams& p, const DeviceTraits& device, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.weight_f16) return static_cast<int>(launch<0, true>(p, device, stream));
  return static_cast<int>(gate_slice_steps(p.depth()) == kGateSteps7168
                              ? launch<kGateSteps7168>(p, device, stream)
                              : launch<0>(p, device, stream));
}

}  // namespace moesaic::cuda
