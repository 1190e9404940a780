// The persistent grouped-GEMM kernel; see cuda_grouped.h for what it does. Template parameters
// select operand format, widest token group, activation family and whether two CTAs share weights.
//
// Threads: warps 0-7 are two consumer warpgroups (128 weight rows each), warp 8 streams weights
// with bulk copies and hands out work items, warps 9-11 gather token rows. Shared memory is a ring
// of stages (32 KiB of weights, up to max_columns token rows, scales) guarded by full/empty
// barriers, and a small ring of work items.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/cuda_epilogue.cuh"
#include "experts/cuda_grouped.h"
#include "permute/cuda_combine.cuh"

namespace moesaic::cuda {

inline constexpr int kThreads = 384;
inline constexpr int kConsumerWarps = 8;
inline constexpr int kTokenWarps = 3;
inline constexpr int kItemSlots = 4;
inline constexpr int kGathersInFlight = 3;  // stages per warp
// Groups with more rows than this are computed with the tokens as the M operand.
inline constexpr int kRowsOrientation = 96;
inline constexpr int kSharedLimit = 227 * 1024;

// A work item as the roles read it. band < 0 ends the kernel.
struct Item {
  std::int32_t band;  // GEMM1: band; GEMM2: band + bands1
  std::int32_t expert, first_row, rows, group;
};

template <class Operand, int kMaxColumns>
struct Layout {
  static constexpr bool kScaled = std::is_same_v<Operand, ptx::E4M3>;
  static constexpr int kTokenBytes = kMaxColumns * kChunkBytes;
  static constexpr int kStageBytes = kBandImageBytes + kTokenBytes;
  // Per stage beside the operands: four weight scales, then one scale per token.
  static constexpr int kScaleBytes = kScaled ? 16 + 4 * kMaxColumns : 0;
  static constexpr int kAmaxBytes = kConsumerWarps * kMaxColumns * 4 + 16 * kMaxColumns;
  static constexpr int kFixedBytes = 1024 /* alignment */ + kAmaxBytes + 512;
  static constexpr int kStages = (kSharedLimit - kFixedBytes) / (kStageBytes + kScaleBytes + 16);
  static constexpr int kOffsetScale = kStages * kStageBytes;
  static constexpr int kOffsetAmax = kOffsetScale + kStages * kScaleBytes;
  static constexpr int kOffsetItems = kOffsetAmax + kAmaxBytes;
  static constexpr int kOffsetBars = (kOffsetItems + kItemSlots * 32 + 15) / 16 * 16;
  static constexpr int kBytes = kOffsetBars + (2 * kStages + 2 * kItemSlots) * 8 + 1024;
  // The launch gives every warpgroup 168 registers per thread; what producers give up is all that
  // consumers can gain.
  static constexpr int kConsumerRegisters = kMaxColumns > 64 ? 224 : 208;
  static constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
  static_assert(kStages >= 3 && kBytes <= kSharedLimit);
};

// Position in a ring of N slots, with the parity its barriers have there.
template <int N>
struct RingPosition {
  std::uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == N) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <class Operand, int kMaxColumns, bool kPaired>
struct Shared {
  using L = Layout<Operand, kMaxColumns>;
  std::uint32_t base;  // 1024-aligned shared address
  char* generic;
  __device__ __forceinline__ std::uint32_t weights(std::uint32_t s) const {
    return base + s * L::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t tokens(std::uint32_t s) const {
    return weights(s) + kBandImageBytes;
  }
  __device__ __forceinline__ std::uint32_t scales(std::uint32_t s) const {
    return base + L::kOffsetScale + s * L::kScaleBytes;
  }
  __device__ __forceinline__ const float* scale_ptr(std::uint32_t s) const {
    return reinterpret_cast<const float*>(generic + L::kOffsetScale + s * L::kScaleBytes);
  }
  __device__ __forceinline__ float* amax() const {
    return reinterpret_cast<float*>(generic + L::kOffsetAmax);
  }
  __device__ __forceinline__ Item* items() const {
    return reinterpret_cast<Item*>(generic + L::kOffsetItems);
  }
  // Behind the items, which leave part of their slots' space unused.
  __device__ __forceinline__ volatile std::uint32_t* flag() const {
    return reinterpret_cast<volatile std::uint32_t*>(generic + L::kOffsetItems +
                                                     kItemSlots * sizeof(Item));
  }
  __device__ __forceinline__ std::uint32_t bar(std::uint32_t i) const {
    return base + L::kOffsetBars + i * 8;
  }
  __device__ __forceinline__ std::uint32_t full(std::uint32_t s) const { return bar(s); }
  __device__ __forceinline__ std::uint32_t empty(std::uint32_t s) const {
    return bar(L::kStages + s);
  }
  __device__ __forceinline__ std::uint32_t item_full(std::uint32_t s) const {
    return bar(2 * L::kStages + s);
  }
  __device__ __forceinline__ std::uint32_t item_empty(std::uint32_t s) const {
    return bar(2 * L::kStages + kItemSlots + s);
  }
};

// --- Work items
// -----------------------------------------------------------------------------------

// Narrow builds split an expert's rows evenly, in multiples of eight, over the fewest groups that
// fit; wide ones fill them when there are more than two.
template <int kMaxColumns, bool kPaired>
__device__ __forceinline__ Item decode_item(const GroupedParams& p, std::uint32_t index,
                                            std::uint32_t items1, std::uint32_t cta) {
  const bool second = index >= items1;
  if (second) index -= items1;
  const std::uint32_t bands = static_cast<std::uint32_t>(second ? p.bands2 : p.bands1);
  const GroupRecord record = p.groups[index / bands];
  constexpr int kPerRecord = kMaxColumns * (kPaired ? 2 : 1);
  const std::uint32_t count =
      static_cast<std::uint32_t>((record.rows + kPerRecord - 1) / kPerRecord);
  // Groups of one band are neighbours in the list, so that later ones find its weights in L2.
  const std::uint32_t local = index - bands * static_cast<std::uint32_t>(record.first_group);
  const std::uint32_t band = local / count;
  const std::uint32_t group = local - band * count;
  Item item;
  item.band = static_cast<std::int32_t>(band) + (second ? p.bands1 : 0);
  item.expert = record.expert;
  item.group = record.first_group + static_cast<std::int32_t>(group);
  int begin = 0, rows = 0;
  if (kPaired) {
    // Two CTAs share a record; the last one is split evenly.
    const int both = min(kPerRecord, record.rows - static_cast<int>(group) * kPerRecord);
    const int half = ((both + 1) / 2 + 7) / 8 * 8;
    begin = static_cast<int>(group) * kPerRecord + static_cast<int>(cta) * half;
    rows = cta == 0 ? min(half, both) : max(both - half, 0);
  } else if (kMaxColumns > kRowsOrientation && count > 2) {
    // Full groups and a remainder: full ones take the faster orientation.
    begin = static_cast<int>(group) * kMaxColumns;
    rows = min(kMaxColumns, record.rows - begin);
  } else {
    const int groups = static_cast<int>(count);
    const int size = ((record.rows + groups - 1) / groups + 7) / 8 * 8;
    begin = min(size * static_cast<int>(group), record.rows);
    rows = min(size, record.rows - begin);
  }
  item.first_row = record.first_row + begin;
  item.rows = rows;
  return item;
}

// --- Producers
// ------------------------------------------------------------------------------------

// One thread: takes items, publishes them to the other roles and streams their weights.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void produce_weights(const GroupedParams& p,
                                                const Shared<Operand, kMaxColumns, kPaired>& sh) {
  using L = Layout<Operand, kMaxColumns>;
  const std::uint32_t groups = *p.num_groups;
  const std::uint32_t items1 = groups * static_cast<std::uint32_t>(p.bands1);
  const std::uint32_t total = items1 + groups * static_cast<std::uint32_t>(p.bands2);
  const std::uint32_t cta = kPaired ? ptx::cluster_cta_rank() : 0;
  const std::uint32_t workers = kPaired ? gridDim.x / 2 : gridDim.x;
  std::uint32_t index = kPaired ? blockIdx.x / 2 : blockIdx.x;
  const std::uint64_t policy = ptx::l2_evict_first_policy();
  RingPosition<L::kStages> ring;
  RingPosition<kItemSlots> slot;
  // CTAs of a pair must agree on the order, so they take fixed strides.
  const auto after = [&](std::uint32_t i) {
    return kPaired ? i + workers : atomicAdd(p.next_item, 1U) + workers;
  };
  const auto publish = [&](const Item& item) {
    ptx::mbarrier_wait(sh.item_empty(slot.slot), slot.parity ^ 1);
    sh.items()[slot.slot] = item;
    ptx::mbarrier_arrive(sh.item_full(slot.slot));
    slot.advance();
  };
  const Item end = {-1, 0, 0, 0, 0};
  const auto decode = [&](std::uint32_t i) {
    return i < total ? decode_item<kMaxColumns, kPaired>(p, i, items1, cta) : end;
  };
  // An item is taken when the weights of the one before have all been asked for: late enough that
  // the last items go to whoever is free, early enough that the ring covers the look-up.
  Item item = decode(index);
  publish(item);
  while (item.band >= 0) {
    const bool second = item.band >= p.bands1;
    const int band = second ? item.band - p.bands1 : item.band;
    const int chunks = second ? p.chunks2 : p.chunks1;
    const int bands = second ? p.bands2 : p.bands1;
    const int slabs = min(2, (second ? p.slabs2 : p.slabs1) - 2 * band);
    const std::int64_t first = (static_cast<std::int64_t>(item.expert) * bands + band) * chunks;
    const std::byte* src = (second ? p.w2 : p.w13) + first * kBandImageBytes;
    const float* scale = (second ? p.w2_scale : p.w13_scale) + first * 4;
    for (int c = 0; c < chunks; ++c) {
      ptx::mbarrier_wait(sh.empty(ring.slot), ring.parity ^ 1);
      const std::uint32_t bar = sh.full(ring.slot);
      const std::uint32_t bytes = static_cast<std::uint32_t>(slabs * kSlabBytes);
      ptx::mbarrier_arrive_expect(bar, bytes + (L::kScaled ? 16 : 0));
      if (kPaired) {
        if (static_cast<int>(cta) < slabs) {
          ptx::bulk_load_multicast(sh.weights(ring.slot) + cta * kSlabBytes, src + cta * kSlabBytes,
                                   kSlabBytes, bar, 3, policy);
        }
      } else {
        ptx::bulk_load(sh.weights(ring.slot), src, bytes, bar, policy);
      }
      if (L::kScaled) ptx::bulk_load(sh.scales(ring.slot), scale, 16, bar, policy);
      src += kBandImageBytes;
      scale += 4;
      ring.advance();
    }
    index = after(index);
    item = decode(index);
    publish(item);
  }
}

// Three warps: gather the item's token rows into the swizzled tile, four rows of eight 16-byte
// pieces per warp and pass. Tile rows past the group keep what they hold: they only reach
// accumulators that nobody reads. A stage is handed over when its copies have landed, looked at
// when the next one has been issued or cannot be.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void produce_tokens(const GroupedParams& p,
                                               const Shared<Operand, kMaxColumns, kPaired>& sh,
                                               int warp, int lane) {
  using L = Layout<Operand, kMaxColumns>;
  constexpr int kRowsPerPass = 4 * kTokenWarps;
  constexpr int kPasses = (kMaxColumns + kRowsPerPass - 1) / kRowsPerPass;
  constexpr int kScalePasses = (4 * kPasses + 31) / 32;
  constexpr std::uint32_t kNoSource = 0xFFFFFFFFU;
  RingPosition<L::kStages> ring, arrived;
  RingPosition<kItemSlots> slot;
  int pending = 0;
  // Waits for the oldest gathers until at most `keep` stages are in flight, and hands them over.
  const auto settle = [&](int keep) {
    while (pending > keep) {
      if (pending == 1) {
        ptx::async_wait<0>();
      } else if (pending == 2) {
        ptx::async_wait<1>();
      } else {
        ptx::async_wait<kGathersInFlight - 1>();
      }
      ptx::fence_proxy_async();
      // Every lane for its own copies: costs nothing measurable, and racecheck can follow it.
      ptx::mbarrier_arrive(sh.full(arrived.slot));
      arrived.advance();
      --pending;
    }
  };
  const int first = warp * 4 + (lane >> 3), piece = lane & 7;
  // A pass is twelve rows further, so its swizzle is that of every second pass.
  const std::uint32_t even =
      static_cast<std::uint32_t>(first * kChunkBytes + ((piece ^ (first & 7)) << 4));
  const std::uint32_t odd =
      static_cast<std::uint32_t>(first * kChunkBytes + ((piece ^ ((first + 4) & 7)) << 4));
  while (true) {
    ptx::mbarrier_wait(sh.item_full(slot.slot), slot.parity);
    const Item item = sh.items()[slot.slot];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.item_empty(slot.slot));
    slot.advance();
    if (item.band < 0) break;
    const bool second = item.band >= p.bands1;
    if (second) {
      const std::uint32_t needed =
          static_cast<std::uint32_t>(p.bands1) * kConsumerWarps * (kPaired ? 2 : 1);
      std::uint32_t* const done = p.group_done + item.group;
      bool ready = lane != 0 || ptx::load_acquire(done) >= needed;
      if (!__all_sync(0xFFFFFFFFU, ready)) {
        // What this warp has gathered must be handed over before it may wait for other CTAs.
        settle(0);
        if (lane == 0) {
          while (ptx::load_acquire(done) < needed) __nanosleep(32);
        }
      }
      __syncwarp();
    }
    const auto source_row = [&](int row) -> std::int32_t {
      if (row >= item.rows) return -1;
      return second ? item.first_row + row : p.pair_of_row[item.first_row + row] / p.top_k;
    };
    const std::int32_t row_bytes = second ? p.row_bytes2 : p.row_bytes1;
    // Offsets in units of 16 bytes, so that 32 bits reach 64 GiB.
    std::uint32_t source[kPasses];
    std::int32_t scale_source[kScalePasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const std::int32_t row = source_row(first + i * kRowsPerPass);
      source[i] =
          row < 0 ? kNoSource
                  : static_cast<std::uint32_t>(row) * static_cast<std::uint32_t>(row_bytes >> 4);
    }
#pragma unroll
    for (int i = 0; i < kScalePasses; ++i) {
      const int entry = lane + 32 * i;
      const int row = warp * 4 + (entry & 3) + kRowsPerPass * (entry >> 2);
      scale_source[i] = L::kScaled ? source_row(row) : -1;
    }
    const std::byte* base = (second ? p.inner : p.x) + piece * 16;
    const float* scale = second ? p.inner_scale : p.x_scale;
    const std::int64_t scale_stride = second ? p.inner_scale_stride : p.x_scale_stride;
    const int chunks = second ? p.chunks2 : p.chunks1;
    for (int c = 0; c < chunks; ++c) {
      // With no free slot there is nothing better to do than to see the gathers through.
      if (!__all_sync(0xFFFFFFFFU, ptx::mbarrier_test(sh.empty(ring.slot), ring.parity ^ 1))) {
        settle(0);
        ptx::mbarrier_wait(sh.empty(ring.slot), ring.parity ^ 1);
      }
      const std::uint32_t tile = sh.tokens(ring.slot);
      // Past the end of the rows the weights are zero; the tokens must not be NaN.
      const bool in_row = c * kChunkBytes + piece * 16 < row_bytes;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (source[i] != kNoSource) {
          ptx::async_load_16(tile + ((i & 1) != 0 ? odd : even) +
                                 static_cast<std::uint32_t>(i * kRowsPerPass * kChunkBytes),
                             ptx::offset_16(base, source[i]), in_row);
        }
      }
      base += kChunkBytes;
      if (L::kScaled) {
#pragma unroll
        for (int i = 0; i < kScalePasses; ++i) {
          if (scale_source[i] >= 0) {
            const int entry = lane + 32 * i;
            const int row = warp * 4 + (entry & 3) + kRowsPerPass * (entry >> 2);
            ptx::async_load_4(sh.scales(ring.slot) + 16 + static_cast<std::uint32_t>(row) * 4,
                              scale + scale_source[i], true);
          }
        }
        scale += scale_stride;
      }
      ptx::async_commit();
      ring.advance();
      ++pending;
      settle(kGathersInFlight - 1);
    }
  }
  settle(0);
}

// --- Consumers
// ------------------------------------------------------------------------------------

// acc[b] holds rows b * 64 .. of the warpgroup's slab: element 4j + i is row g, column 8j + 2t + i,
// element 4j + 2 + i row g + 8, with g = lane / 4, t = lane % 4 and 16 rows per warp.
template <class Operand, int kMaxColumns, bool kPaired, int kColumns>
__device__ __forceinline__ void multiply(const Shared<Operand, kMaxColumns, kPaired>& sh,
                                         RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring,
                                         int chunks, int group, int lane, bool scale_by_row_half,
                                         float (&acc)[2][kColumns / 2]) {
  using L = Layout<Operand, kMaxColumns>;
  using Mma = ptx::Wgmma<Operand, kColumns>;
  constexpr std::uint64_t kBlockStep = 8192 >> 4;  // 64 rows of A
  const auto release = [&](std::uint32_t slot) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(sh.empty(slot));
      if (kPaired) ptx::mbarrier_arrive_remote(sh.empty(slot), ptx::cluster_cta_rank() ^ 1);
    }
  };
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0.0F;
  }
  if constexpr (!L::kScaled) {
    for (int c = 0; c < chunks; ++c) {
      ptx::mbarrier_wait(sh.full(ring.slot), ring.parity);
      const std::uint64_t a = ptx::wgmma_descriptor(sh.weights(ring.slot) +
                                                    static_cast<std::uint32_t>(group) * kSlabBytes);
      const std::uint64_t b = ptx::wgmma_descriptor(sh.tokens(ring.slot));
      ptx::wgmma_fence();
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Mma::run(acc[m],
                   a + static_cast<std::uint64_t>(m) * kBlockStep +
                       static_cast<std::uint64_t>(k) * ptx::kWgmmaStep,
                   b + static_cast<std::uint64_t>(k) * ptx::kWgmmaStep, 1);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      release(ring.slot);
      ring.advance();
    }
  } else {
    constexpr int kSets = kColumns <= 64 ? 2 : 1;  // accumulators of both blocks, or in turn
    for (int c = 0; c < chunks; ++c) {
      ptx::mbarrier_wait(sh.full(ring.slot), ring.parity);
      const std::uint64_t a = ptx::wgmma_descriptor(sh.weights(ring.slot) +
                                                    static_cast<std::uint32_t>(group) * kSlabBytes);
      const std::uint64_t b = ptx::wgmma_descriptor(sh.tokens(ring.slot));
      const float* scales = sh.scale_ptr(ring.slot);
      // Two scales per stage: of the row halves (gate and up rows), or of the two slabs.
      const float lo = scales[scale_by_row_half ? 0 : group];
      const float hi = scales[scale_by_row_half ? 1 : group];
      const float2* token_scales = reinterpret_cast<const float2*>(scales + 4) + (lane & 3);
      float part[kSets][kColumns / 2];
      const auto promote = [&](float(&to)[kColumns / 2], const float(&from)[kColumns / 2]) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          const float2 s = token_scales[j * 4];
          to[4 * j] = fmaf(from[4 * j], s.x * lo, to[4 * j]);
          to[4 * j + 1] = fmaf(from[4 * j + 1], s.y * lo, to[4 * j + 1]);
          to[4 * j + 2] = fmaf(from[4 * j + 2], s.x * hi, to[4 * j + 2]);
          to[4 * j + 3] = fmaf(from[4 * j + 3], s.y * hi, to[4 * j + 3]);
        }
      };
      const auto issue = [&](float(&d)[kColumns / 2], int m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Mma::run(d,
                   a + static_cast<std::uint64_t>(m) * kBlockStep +
                       static_cast<std::uint64_t>(k) * ptx::kWgmmaStep,
                   b + static_cast<std::uint64_t>(k) * ptx::kWgmmaStep, k > 0);
        }
        ptx::wgmma_commit();
      };
      if constexpr (kSets == 2) {
        ptx::wgmma_fence();
        issue(part[0], 0);
        issue(part[1], 1);
        ptx::wgmma_wait<1>();
        promote(acc[0], part[0]);
        ptx::wgmma_wait<0>();
        promote(acc[1], part[1]);
      } else {
        ptx::wgmma_fence();
        issue(part[0], 0);
        ptx::wgmma_wait<0>();
        promote(acc[0], part[0]);
        ptx::wgmma_fence();
        issue(part[0], 1);
        ptx::wgmma_wait<0>();
        promote(acc[1], part[0]);
      }
      release(ring.slot);
      ring.advance();
    }
  }
}

// The same products with the tokens as the M operand: the warpgroup has 64 token rows and all 256
// weight rows. Element 64 h + 4j + i of acc is token row g, weight row 128 h + 8j + 2t + i of the
// band; 64 h + 4j + 2 + i is token row g + 8. Scales cost two registers per token row instead of
// two loads and four products per column, which is what makes this orientation faster for full
// groups.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void multiply_rows(
    const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, int chunks, int group, int warp,
    int lane, bool scale_by_row_half, bool active, float (&acc)[128]) {
  using L = Layout<Operand, kMaxColumns>;
#pragma unroll
  for (int i = 0; i < 128; ++i) acc[i] = 0.0F;
  const std::uint32_t row_offset = static_cast<std::uint32_t>(group) * 8192;
  for (int c = 0; c < chunks; ++c) {
    ptx::mbarrier_wait(sh.full(ring.slot), ring.parity);
    if (active) {
      const std::uint64_t a = ptx::wgmma_descriptor(sh.tokens(ring.slot) + row_offset);
      const std::uint64_t b = ptx::wgmma_descriptor(sh.weights(ring.slot));
      if constexpr (!L::kScaled) {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          ptx::Wgmma<Operand, 256>::run(acc, a + static_cast<std::uint64_t>(k) * ptx::kWgmmaStep,
                                        b + static_cast<std::uint64_t>(k) * ptx::kWgmmaStep, 1);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
      } else {
        const float* scales = sh.scale_ptr(ring.slot);
        const float* token_scale = scales + 4 + group * 64 + (warp & 3) * 16 + (lane >> 2);
        const float lo = token_scale[0], hi = token_scale[8];
        const float first = scales[0], other = scales[1];
        float part[64];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            ptx::Wgmma<Operand, 128>::run(part, a + static_cast<std::uint64_t>(k) * ptx::kWgmmaStep,
                                          b + static_cast<std::uint64_t>(h * (kSlabBytes >> 4)) +
                                              static_cast<std::uint64_t>(k) * ptx::kWgmmaStep,
                                          k > 0);
          }
          ptx::wgmma_commit();
          // Gate and up chunks alternate, or the slab decides.
          const float w0 = scale_by_row_half || h == 0 ? first : other;
          const float w1 = scale_by_row_half ? other : w0;
          const float lo0 = lo * w0, hi0 = hi * w0, lo1 = lo * w1, hi1 = hi * w1;
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            const float fl = (j & 1) != 0 ? lo1 : lo0, fh = (j & 1) != 0 ? hi1 : hi0;
            const int at = 64 * h + 4 * j;
            acc[at] = fmaf(part[4 * j], fl, acc[at]);
            acc[at + 1] = fmaf(part[4 * j + 1], fl, acc[at + 1]);
            acc[at + 2] = fmaf(part[4 * j + 2], fh, acc[at + 2]);
            acc[at + 3] = fmaf(part[4 * j + 3], fh, acc[at + 3]);
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(sh.empty(ring.slot));
      if (kPaired) {
        ptx::mbarrier_arrive_remote(sh.empty(ring.slot), ptx::cluster_cta_rank() ^ 1);
      }
    }
    ring.advance();
  }
}

template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void consume_rows(
    const GroupedParams& p, const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, const Item& item, int group,
    int warp, int lane) {
  const bool second = item.band >= p.bands1;
  const int row = group * 64 + (warp & 3) * 16 + (lane >> 2);
  const bool active = item.rows > group * 64;
  float acc[128];
  if (second) {
    std::int32_t pair[2];
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = item.first_row + row + 8 * i;
      const bool valid = row + 8 * i < item.rows;
      pair[i] = valid ? p.pair_of_row[at] : -1;
      factor[i] = valid && p.weight_of_row != nullptr ? p.weight_of_row[at] : 1.0F;
    }
    multiply_rows<Operand>(sh, ring, p.chunks2, group, warp, lane, false, active, acc);
    store_weighted_rows(p, item.expert, item.band - p.bands1, lane, pair, factor, acc);
  } else {
    multiply_rows<Operand>(sh, ring, p.chunks1, group, warp, lane, true, active, acc);
    if (active) {
      store_activated_rows<Operand>(p, item.expert, item.band, item.first_row + row,
                                    item.rows - row, lane, acc);
    }
    __syncwarp();
    if (lane == 0) ptx::add_release(p.group_done + item.group, 1);
  }
}

// The 256 consumer threads, after the stores of a GEMM2 item: the last item of a band sums the
// band's columns of every token.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void combine_band(const GroupedParams& p,
                                             const Shared<Operand, kMaxColumns, kPaired>& sh,
                                             int band) {
  const int thread = static_cast<int>(threadIdx.x);
  ptx::named_barrier_sync(kRequantBarrier, 256);
  if (thread == 0) {
    *sh.flag() = ptx::add_acq_rel(p.band_done + band, 1) + 1 == *p.num_groups ? 1 : 0;
  }
  ptx::named_barrier_sync(kRequantBarrier, 256);
  if (*sh.flag() == 0) return;
  const std::int64_t column = static_cast<std::int64_t>(band) * kBandRows + thread % 32 * 8;
  if (column >= p.hidden) return;
  for (std::int64_t t = thread / 32; t < p.combine.tokens; t += 8)
    combine_columns(p.combine, t, column);
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired, int kColumns>
__device__ __forceinline__ void consume_item(
    const GroupedParams& p, const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, const Item& item, int group,
    int warp, int lane) {
  const bool second = item.band >= p.bands1;
  constexpr int kLists = (kColumns + 31) / 32;
  float acc[2][kColumns / 2];
  if (second) {
    // Destination and factor of column `lane + 32 i`, asked for early.
    std::int32_t pair[kLists];
    float factor[kLists];
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      const int column = lane + 32 * i;
      const bool valid = column < item.rows;
      pair[i] = valid ? p.pair_of_row[item.first_row + column] : -1;
      factor[i] =
          valid && p.weight_of_row != nullptr ? p.weight_of_row[item.first_row + column] : 1.0F;
    }
    multiply<Operand, kMaxColumns, kPaired, kColumns>(sh, ring, p.chunks2, group, lane, false, acc);
    store_weighted<kColumns>(p, item.expert, item.band - p.bands1, group, warp & 3, lane, pair,
                             factor, acc);
    if (!kPaired && kMaxColumns <= 64 && p.fold_combine) combine_band(p, sh, item.band - p.bands1);
  } else {
    multiply<Operand, kMaxColumns, kPaired, kColumns>(sh, ring, p.chunks1, group, lane,
                                                      kEpilogue != EpilogueKind::kPlain, acc);
    store_activated<Operand, kEpilogue, kColumns>(p, item.expert, item.band, item.first_row,
                                                  item.rows, group, warp, lane, sh.amax(), acc);
    __syncwarp();
    if (lane == 0) ptx::add_release(p.group_done + item.group, 1);
  }
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired>
__device__ __forceinline__ void consume(const GroupedParams& p,
                                        const Shared<Operand, kMaxColumns, kPaired>& sh, int warp,
                                        int lane) {
  RingPosition<Layout<Operand, kMaxColumns>::kStages> ring;
  RingPosition<kItemSlots> slot;
  const int group = warp >> 2;
  if (!kPaired && kMaxColumns <= 64 && p.fold_combine && *p.num_groups == 0) {
    // Nobody has work, but every output must be written.
    const std::int64_t vectors = p.hidden / 8;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
         i < p.combine.tokens * vectors; i += static_cast<std::int64_t>(gridDim.x) * 256) {
      combine_columns(p.combine, i / vectors, i % vectors * 8);
    }
  }
  while (true) {
    ptx::mbarrier_wait(sh.item_full(slot.slot), slot.parity);
    const Item item = sh.items()[slot.slot];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.item_empty(slot.slot));
    slot.advance();
    if (item.band < 0) break;
    const auto with = [&](auto columns) {
      consume_item<Operand, kMaxColumns, kEpilogue, kPaired, decltype(columns)::value>(
          p, sh, ring, item, group, warp, lane);
    };
    // The fewest columns that hold the group; any choice gives the same bits.
    if constexpr (kMaxColumns <= 32) {
      if (item.rows <= 8)
        with(std::integral_constant<int, 8>{});
      else if (item.rows <= 16)
        with(std::integral_constant<int, 16>{});
      else
        with(std::integral_constant<int, 32>{});
    } else if constexpr (kMaxColumns <= 64) {
      if (item.rows <= 16)
        with(std::integral_constant<int, 16>{});
      else if (item.rows <= 32)
        with(std::integral_constant<int, 32>{});
      else if (item.rows <= 48)
        with(std::integral_constant<int, 48>{});
      else
        with(std::integral_constant<int, 64>{});
    } else {
      if constexpr (kEpilogue == EpilogueKind::kSwiglu) {
        if (item.rows > kRowsOrientation) {
          consume_rows<Operand>(p, sh, ring, item, group, warp, lane);
          continue;
        }
      }
      if (item.rows <= 16)
        with(std::integral_constant<int, 16>{});
      else if (item.rows <= 48)
        with(std::integral_constant<int, 48>{});
      else if (item.rows <= 64)
        with(std::integral_constant<int, 64>{});
      else if (item.rows <= 80)
        with(std::integral_constant<int, 80>{});
      else
        with(std::integral_constant<int, 96>{});
    }
  }
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_grouped_experts(const __grid_constant__ GroupedParams p) {
  using L = Layout<Operand, kMaxColumns>;
  extern __shared__ char raw[];
  Shared<Operand, kMaxColumns, kPaired> sh;
  const std::uint32_t unaligned = ptx::shared_address(raw);
  sh.base = (unaligned + 1023U) & ~1023U;
  sh.generic = raw + (sh.base - unaligned);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      ptx::mbarrier_init(sh.full(s), 1 + 32 * kTokenWarps);
      ptx::mbarrier_init(sh.empty(s), kConsumerWarps * (kPaired ? 2 : 1));
    }
    for (int s = 0; s < kItemSlots; ++s) {
      ptx::mbarrier_init(sh.item_full(s), 1);
      ptx::mbarrier_init(sh.item_empty(s), kConsumerWarps + kTokenWarps);
    }
    ptx::mbarrier_init_fence();
  }
  if (kPaired) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (warp >= kConsumerWarps) {
    ptx::registers_decrease<L::kProducerRegisters>();
    if (warp == kConsumerWarps) {
      if (lane == 0) produce_weights<Operand, kMaxColumns, kPaired>(p, sh);
      __syncwarp();
    } else {
      produce_tokens<Operand, kMaxColumns, kPaired>(p, sh, warp - kConsumerWarps - 1, lane);
    }
  } else {
    ptx::registers_increase<L::kConsumerRegisters>();
    consume<Operand, kMaxColumns, kEpilogue, kPaired>(p, sh, warp, lane);
  }
  // A CTA must outlive the copies and arrivals that its neighbour sends.
  if (kPaired) ptx::cluster_sync();
}

}  // namespace moesaic::cuda
