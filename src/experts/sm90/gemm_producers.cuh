// The producer warps of the grouped-GEMM kernel (grouped_gemm.cuh): one streams weights with bulk
// copies and hands out work items, three gather token rows.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/gemm_items.cuh"
#include "experts/sm90/gemm_layout.cuh"
#include "experts/sm90/gemm_stages.cuh"

namespace moesaic::cuda {

// One thread: takes items, publishes them to the other roles and streams their weights.
template <class Format, class Tile>
__device__ __forceinline__ void produce_weights(const GroupedParams& p,
                                                const Shared<Format, Tile>& sh) {
  using L = Layout<Format, Tile>;
  const std::uint32_t num_groups = sh.num_groups(p);
  const GroupRecord* const groups = sh.groups(p);
  const std::uint32_t items1 = num_groups * static_cast<std::uint32_t>(p.bands1);
  const bool one_slab = takes_slabs<Format, Tile>(p, num_groups);
  const std::uint32_t total =
      items1 + num_groups * static_cast<std::uint32_t>(one_slab ? p.slabs2 : p.bands2);
  constexpr bool kCluster = Tile::kPaired || L::kSplit;
  const std::uint32_t cta = kCluster ? ptx::cluster_cta_rank() : 0;
  const std::uint32_t workers = kCluster ? gridDim.x / 2 : gridDim.x;
  std::uint32_t index = kCluster ? blockIdx.x / 2 : blockIdx.x;
  const std::uint64_t policy = ptx::l2_evict_first_policy();
  RingPosition<L::kStages> ring;
  RingPosition<kItemSlots> slot;
  RingPosition<kIndexSlots> shared_index;
  // The first CTA of a pair takes items for both. It cannot get far ahead: the stages that it fills
  // are handed back by the consumers of both.
  const auto take = [&]() -> std::uint32_t {
    // Split: in turn. Pairs without an item of GEMM1 would take too many of GEMM2's, whose weights
    // they have no room for (measured: 3 us).
    if (L::kSplit) return index + workers;
    if (!Tile::kPaired) return atomicAdd(p.list.next_item, 1U) + workers;
    static_assert(kIndexSlots > L::kStages + 1 || !Tile::kPaired);
    const std::uint32_t at = sh.index_at(shared_index.slot());
    const std::uint32_t bar = sh.index_full(shared_index.slot());
    std::uint32_t i = 0;
    if (cta == 0) {
      i = atomicAdd(p.list.next_item, 1U) + workers;
      ptx::store_remote_async(at, i, bar, 1);
    } else {
      ptx::mbarrier_arrive_expect(bar, 4);
      ptx::mbarrier_wait(bar, shared_index.parity());
      i = ptx::load_shared(at);
    }
    shared_index.advance();
    return i;
  };
  const auto slabs_of = [&](const Item& item) {
    const bool second = item.band >= p.bands1;
    if (second && one_slab) return 1;
    return min(2, second ? p.slabs2 - 2 * (item.band - p.bands1) : p.slabs1 - 2 * item.band);
  };
  const auto publish = [&](const Item& item) {
    // Nothing for this CTA in a band of one slab.
    if (L::kSplit && item.band >= 0 && static_cast<int>(cta) >= slabs_of(item)) return;
    ptx::mbarrier_wait(sh.item_empty(slot.slot()), slot.parity() ^ 1);
    sh.items()[slot.slot()] = item;
    ptx::mbarrier_arrive(sh.item_full(slot.slot()));
    slot.advance();
  };
  const Item end = {-1, 0, 0, 0, 0};
  const auto decode = [&](std::uint32_t i) {
    return i < total ? decode_item<Tile>(p, groups, i, items1, cta, one_slab) : end;
  };
  RingPosition<L::kStages> last;  // stage that was requested
  enum : std::uint8_t { kNone, kGemm1, kGemm2 } before = kNone;
  // An item is taken when the weights of the one before have all been requested: late enough that
  // the last items go to a CTA that is free, early enough that the ring hides the look-up.
  Item item = decode(index);
  publish(item);
  while (item.band >= 0) {
    const bool second = item.band >= p.bands1;
    int band = second ? item.band - p.bands1 : item.band;
    int slab = 0;  // of the band, the first that is loaded
    if (second && one_slab) {
      slab = band & 1;
      band = (band & ~kOneSlab) >> 1;
    }
    const int chunks = second ? p.chunks2 : p.chunks1;
    const int bands = second ? p.bands2 : p.bands1;
    const int slabs = slabs_of(item);
    const std::int64_t first = (static_cast<std::int64_t>(item.expert) * bands + band) * chunks;
    const int slab_bytes = L::slab_bytes(L::kTwoForms && second ? p.codes2 : p.codes);
    const std::byte* src = (second ? p.weights.w2 : p.weights.w13) + first * (2 * slab_bytes);
    const float* scale = (second ? p.weights.w2_scale : p.weights.w13_scale) +
                         first * (Format::WeightScales::kStageBytes / 4);
    if (L::kSplit) src += static_cast<int>(cta) * slab_bytes;
    if (L::kSlabItems) src += slab * slab_bytes;
    MOESAIC_CUDA_FAULT(cuda_slabs_have_the_weights_of_the_first, src -= slab * slab_bytes;)
    const auto place = static_cast<std::uint32_t>(L::kSlabItems ? slab * slab_bytes : 0);
    const bool absent = L::kSplit && static_cast<int>(cta) >= slabs;
    if (L::kSplit && second && !absent) {
      // Every CTA waits for GEMM1, so its weights come first: those of GEMM2 are requested when
      // this CTA's weights of GEMM1 have arrived, or when some CTA has finished its own.
      if (before == kNone) {
        while (ptx::load_acquire(p.list.group_done + item.group) == 0) __nanosleep(64);
      } else if (before == kGemm1) {
        ptx::mbarrier_wait(sh.full(last.slot()), last.parity());
      }
    }
    if (!absent) before = second ? kGemm2 : kGemm1;
    for (int left = absent ? 0 : chunks; left > 0;) {
      last = ring;
      ptx::mbarrier_wait(sh.empty(ring.slot()), ring.parity() ^ 1);
      const std::uint32_t bar = sh.full(ring.slot());
      const auto bytes = static_cast<std::uint32_t>((L::kSplit ? 1 : slabs) * slab_bytes);
      const int count = L::next_chunks(left);
      left -= count;
      ptx::mbarrier_arrive_expect(
          bar, static_cast<std::uint32_t>(count) * bytes + Format::WeightScales::kStageBytes);
      if (Tile::kPaired) {
        if (static_cast<int>(cta) < slabs) {
          ptx::bulk_load_multicast(sh.weights(ring.slot()) + cta * L::kSlabBytes,
                                   src + cta * L::kSlabBytes, L::kSlabBytes, bar, 3, policy);
        }
        src += 2 * slab_bytes;
      } else {
#pragma unroll
        for (int i = 0; i < L::kStageChunks; ++i) {
          if (i > 0 && i >= count) break;
          ptx::bulk_load(sh.weights(ring.slot(), i) + place, src, bytes, bar, policy);
          src += 2 * slab_bytes;
        }
      }
      if (Format::WeightScales::kStageBytes > 0) {
        ptx::bulk_load(sh.scales(ring.slot()), scale, Format::WeightScales::kStageBytes, bar,
                       policy);
      }
      scale += Format::WeightScales::kStageBytes / 4;
      MOESAIC_CUDA_FAULT(cuda_experts_scales_of_the_first_chunk,
                         scale -= Format::WeightScales::kStageBytes / 4;)
      ring.advance();
    }
    index = take();
    item = decode(index);
    publish(item);
  }
}

// Three warps: gather the item's token rows into the swizzled tile, four rows of eight 16-byte
// pieces per warp and pass. Tile rows past the group keep what they hold: they only reach
// accumulators that nobody reads. The copies hand a stage over themselves when they have landed, so
// the warps run ahead as far as there are free stages.
template <class Format, class Tile>
__device__ __forceinline__ void produce_tokens(const GroupedParams& p,
                                               const Shared<Format, Tile>& sh, int warp, int lane) {
  using L = Layout<Format, Tile>;
  constexpr bool kScaled = Format::Tokens::kScaleBytes > 0;
  static_assert(!kScaled || Format::Tokens::kScaleBytes == 4);
  constexpr int kRowsPerPass = 4 * kTokenWarps;
  constexpr int kPasses = (Tile::kMaxColumns + kRowsPerPass - 1) / kRowsPerPass;
  constexpr int kScalePasses = (4 * kPasses + 31) / 32;
  constexpr std::uint32_t kNoSource = 0xFFFFFFFFU;
  const std::int32_t* const pair_of_row = sh.pair_of_row(p);
  RingPosition<L::kStages> ring;
  RingPosition<kItemSlots> slot;
  const int first = warp * 4 + (lane >> 3), piece = lane & 7;
  // A pass is twelve rows further, so its swizzle is that of every second pass.
  const std::uint32_t even =
      static_cast<std::uint32_t>(first * kChunkBytes + ((piece ^ (first & 7)) << 4));
  const std::uint32_t odd =
      static_cast<std::uint32_t>(first * kChunkBytes + ((piece ^ ((first + 4) & 7)) << 4));
  while (true) {
    const Item item = take_item(sh, slot, lane);
    if (item.band < 0) break;
    const bool second = item.band >= p.bands1;
    if (second) {
      auto needed = static_cast<std::uint32_t>(L::kSplit ? p.slabs1 * kGroupWarps
                                                         : p.bands1 * L::kEpilogueWarps *
                                                               (Tile::kPaired ? 2 : 1));
      if constexpr (Format::Inner::kWholeRow) {
        if (p.whole.inner_static == nullptr) needed = kGroupQuantised;
      }
      std::uint32_t* const done = p.list.group_done + item.group;
      if (lane == 0) {
        while (ptx::load_acquire(done) < needed) __nanosleep(32);
      }
      __syncwarp();
    }
    const auto source_row = [&](int row) -> std::int32_t {
      if (row >= item.rows) return -1;
      return second ? item.first_row + row : pair_of_row[item.first_row + row] / p.top_k;
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
      scale_source[i] = kScaled ? source_row(row) : -1;
      MOESAIC_CUDA_FAULT(cuda_experts_token_scales_of_one_row,
                         scale_source[i] = kScaled && row < item.rows ? source_row(0) : -1;)
    }
    const std::byte* base = (second ? p.rows.inner : p.rows.x) + piece * 16;
    const float* scale = second ? p.rows.inner_scale : p.rows.x_scale;
    const std::int64_t scale_stride = second ? p.rows.inner_scale_stride : p.rows.x_scale_stride;
    const int chunks = second ? p.chunks2 : p.chunks1;
    for (int c = 0; c < chunks;) {
      ptx::mbarrier_wait(sh.empty(ring.slot()), ring.parity() ^ 1);
      const int count = L::next_chunks(chunks - c);
#pragma unroll
      for (int i = 0; i < L::kStageChunks; ++i) {
        if (i > 0 && i >= count) break;
        const std::uint32_t tile = sh.tokens(ring.slot(), i);
        // Past the end of the rows the weights are zero; the tokens must not be NaN.
        bool in_row = c * kChunkBytes + piece * 16 < row_bytes;
        ++c;
        MOESAIC_CUDA_FAULT(cuda_experts_last_chunk_dropped, in_row = in_row && c < chunks;)
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if (source[pass] != kNoSource) {
            ptx::async_load_16(tile + ((pass & 1) != 0 ? odd : even) +
                                   static_cast<std::uint32_t>(pass * kRowsPerPass * kChunkBytes),
                               ptx::offset_16(base, source[pass]), in_row);
          }
        }
        base += kChunkBytes;
      }
      if (kScaled) {
#pragma unroll
        for (int i = 0; i < kScalePasses; ++i) {
          if (scale_source[i] >= 0) {
            const int entry = lane + 32 * i;
            const int row = warp * 4 + (entry & 3) + kRowsPerPass * (entry >> 2);
            ptx::async_load_4(sh.scales(ring.slot()) + Format::WeightScales::kStageBytes +
                                  static_cast<std::uint32_t>(row) * 4,
                              scale + scale_source[i], true);
          }
        }
        scale += scale_stride;
      }
      ptx::async_arrive(sh.full(ring.slot()));
      ring.advance();
    }
  }
  ptx::async_wait_all();
}

}  // namespace moesaic::cuda
