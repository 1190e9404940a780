// What the roles of the grouped-GEMM kernel (grouped_gemm.cuh) share: the layout of shared memory,
// positions in its rings, and work items.
#pragma once

#include <cstdint>
#include <type_traits>

#include "experts/sm90/codes_table.h"
#include "experts/sm90/format_parts.h"
#include "experts/sm90/grouped_gemm.h"

namespace moesaic::cuda {

inline constexpr int kTokenWarps = 3;
inline constexpr int kGroupWarps = 4;      // of a consumer warpgroup
inline constexpr int kRequantBarrier = 1;  // named barrier of all consumer threads of the CTA
inline constexpr int kSlabBarrier = 8;     // and the next: of those of a slab's epilogue
inline constexpr int kItemSlots = 4;
inline constexpr int kIndexSlots = 8;  // more than the items that the stages in flight can span
// Groups with more rows than this are computed with the tokens as the M operand.
inline constexpr int kRowsOrientation = 96;

// In Item::band, behind bands1: a slab of w2, not a band.
inline constexpr std::int32_t kOneSlab = 1 << 30;

// A work item as the roles read it. band < 0 ends the kernel.
struct Item {
  std::int32_t band;  // GEMM1: band; GEMM2: band + bands1, or slab + kOneSlab + bands1
  std::int32_t expert, first_row, rows, group;
};

// What a token's routing takes.
struct RoutedToken {
  float scores[kRouteColumns];
  std::uint32_t keys[kRouteColumns];
  alignas(16) std::uint32_t candidates[32];
  std::uint32_t group_keys[32];
  std::int32_t columns[32];
  std::uint32_t tops[20];  // of the token's warps
};

// A work list in shared memory.
struct SharedList {
  GroupRecord groups[kListPairs];
  std::int32_t pair_of_row[kListPairs];
  float weight_of_row[kListPairs];
  std::int32_t row_of_pair[kListPairs];
  std::uint32_t num_groups;
  // Where the kernel routes: of all tokens in turn.
  std::int32_t ids[kListPairs];
  float weights[kListPairs];
  float biases[kRouteColumns];
  RoutedToken routed[kRouteTokens];
};

// The widest group of a build, and whether two CTAs of a cluster work on two groups of one band and
// share its weights. The narrowest build is split: a band's two slabs go to the two CTAs of a
// cluster, one consumer warpgroup each. kSmallEpilogue: it needs few registers, so that weights that
// are decoded may have twice the warps.
template <int kWidest, bool kShares = false, bool kSmall = true>
struct TokenTile {
  static constexpr bool kSmallEpilogue = kSmall;
  static constexpr int kMaxColumns = kWidest;
  static constexpr bool kPaired = kShares;
  static constexpr bool kSplit = kMaxColumns <= kSplitColumns;
  static_assert(!kPaired || !kSplit);
};

template <class Format, class Tile>
struct Layout {
  static constexpr bool kSplit = Tile::kSplit;
  // Consumer warpgroups of a slab: one for both of its blocks of 64 rows, or one each. The first has
  // the epilogue and is given the other block's sums.
  static constexpr int kSlabGroups =
      Tile::kSmallEpilogue ? Format::Weights::groups_of_slab(Tile::kMaxColumns) : 1;
  static constexpr int kEpilogueWarps = kSplit ? kGroupWarps : 2 * kGroupWarps;
  static constexpr int kEpilogueThreads = 32 * kEpilogueWarps;
  static constexpr int kConsumerWarps = kSlabGroups * kEpilogueWarps;
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kThreads = kConsumerThreads + 32 * (1 + kTokenWarps);
  static constexpr int kTokenBytes = Tile::kMaxColumns * kChunkBytes;
  static constexpr int kSlabBytes = FormatSizes<Format>::kSlabBytes;
  static constexpr int kBandBytes = 2 * kSlabBytes;  // of a chunk, in the image
  // w2 has codes of another form than w13.
  using OfW2 = typename FormatOfW2<Format>::Type;
  static constexpr bool kTwoForms = !std::is_same_v<OfW2, Format>;
  // The image's slabs may be smaller than what there is room for.
  static constexpr bool kVaries = requires { requires Format::WeightScales::kVaries; };
  static constexpr __device__ __forceinline__ int slab_bytes(const CodeImage& codes) {
    return kVaries ? codes.slab_bytes : kSlabBytes;
  }
  // What follows, the tile of tokens, must be aligned as the swizzle is.
  static constexpr int kWeightBytes = ((kSplit ? kSlabBytes : kBandBytes) + 1023) / 1024 * 1024;
  static constexpr int kPartBytes = kWeightBytes + kTokenBytes;
  // Per stage beside the operands: scales of weights, then those of each token.
  static constexpr int kScaleBytes =
      Format::WeightScales::kStageBytes + Format::Tokens::kScaleBytes * Tile::kMaxColumns;
  // Largest magnitudes of both consumer groups' warps (twice where they come from two CTAs), then
  // scales and reciprocals of two requantisation groups.
  static constexpr int kAmaxWords = 2 * kGroupWarps * Tile::kMaxColumns;
  static constexpr bool kHasAmax =
      Format::Inner::kQuantises || Format::Inner::kWholeRow || Format::Inner::kValues;
  static constexpr int kAmaxBytes =
      kHasAmax ? (kSplit ? 2 : 1) * kAmaxWords * 4 + 16 * Tile::kMaxColumns : 0;
  static constexpr bool kMakesList = Tile::kMaxColumns <= kListColumns;
  // Where all bands of GEMM2 are fewer than half of the CTAs, an item of it is a slab: of few tokens
  // of models with few or wide experts (gpt-oss, Mixtral, Llama 4). Not of decoded weights whose sums
  // are taken out: it costs them registers, and others' few tokens 3 %.
  static constexpr bool kSlabItems = kMakesList && !kSplit && !Tile::kPaired &&
                                     (Format::Weights::kTokensAsRows || !Format::Promote::kParts);
  static constexpr int kListBytes = kMakesList ? static_cast<int>(sizeof(SharedList)) : 0;
  // Sums of second blocks, on their way to the epilogue.
  static constexpr int kSentBytes =
      kSlabGroups > 1 ? kEpilogueThreads* Tile::kMaxColumns / 2 * 4 : 0;
  // Pairs of entries (codes_table.h).
  static constexpr bool kHasTable = requires { requires Format::Weights::kHasTable; };
  static constexpr int kPairsBytes = kHasTable ? kTableBytes : 0;
  static constexpr int kFixedBytes =
      1024 /* alignment */ + kAmaxBytes + 512 + kSentBytes + kListBytes + kPairsBytes;
  // Neighbouring chunks of a stage, 1 or 2, which has one pair of barriers for them: 2 where the
  // format says so and three such stages fit. Of an odd number of chunks the first or the last is
  // alone in its stage.
  static constexpr int fitting(int stage_chunks) {
    return (kHopperSharedBytes - kFixedBytes) / (stage_chunks * kPartBytes + kScaleBytes + 16);
  }
  static constexpr int kStageChunks =
      fitting(2) < 3
          ? 1
          : Format::Weights::template stage_chunks<typename Format::Promote>(Tile::kMaxColumns);
  // How many of the next ones its stage has, when `left` of an item are left.
  static constexpr __device__ __forceinline__ int next_chunks(int left) {
    if (kStageChunks == 1) return 1;
    return Format::Weights::kOddFirst ? 2 - left % 2 : min(2, left);
  }
  static constexpr int kStageBytes = kStageChunks * kPartBytes;
  // Lanes of a consumer warp that hand a stage back. One is enough; where all of them read codes,
  // racecheck does not see that it speaks for the others; an arrival by each costs 0 to 1.4 %.
  static constexpr int kReleaseLanes = Format::Weights::kTokensAsRows ? 1 : 32;
  static_assert(kReleaseLanes == 1 || !Tile::kPaired);
  static_assert(kStageChunks == 1 ||
                Format::WeightScales::kStageBytes + Format::Tokens::kScaleBytes == 0);
  // Few tokens: four stages stream as fast as six, and leave the kernels that follow the room to
  // start early (measured: the layer at M = 1 to 16 is 2 to 8 % faster).
  // Packed weights: about as many bytes in flight.
  static constexpr int kPacked = Format::kChunkK * Format::kWeightBits < 8 * kChunkBytes ? 2 : 1;
  static constexpr int kMostStages = kPacked *
                                     (kSplit                    ? 8
                                      : Tile::kMaxColumns <= 48 ? 4
                                                                : 16) /
                                     kStageChunks;
  static constexpr int kFitting = fitting(kStageChunks);
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static constexpr int kOffsetScale = kStages * kStageBytes;
  static constexpr int kOffsetAmax = kOffsetScale + kStages * kScaleBytes;
  static constexpr int kOffsetItems = kOffsetAmax + kAmaxBytes;
  static constexpr int kOffsetBars = (kOffsetItems + kItemSlots * 32 + 15) / 16 * 16;
  static constexpr int kSentBars = kSlabGroups > 1 ? kEpilogueWarps : 0;
  static constexpr int kOtherBars = 2 * kStages + 2 * kItemSlots + kIndexSlots + (kSplit ? 2 : 0);
  static constexpr int kBars = kOtherBars + 2 * kSentBars;
  static constexpr int kOffsetList = (kOffsetBars + kBars * 8 + 15) / 16 * 16;
  static constexpr int kOffsetSent = (kOffsetList + kListBytes + 15) / 16 * 16;
  static constexpr int kOffsetPairs = kOffsetSent + kSentBytes;
  static constexpr int kBytes = kOffsetPairs + kPairsBytes + 1024;
  // The launch gives every warpgroup 168 registers per thread, or 128 (what a block of
  // kBoundThreads could have) where few tokens need no more: the kernel that follows finds some
  // free, so that it can start early. What producers give up is all that consumers can gain.
  // Of five warpgroups each thread has 96. Split builds of two warpgroups are two on a multiprocessor.
  static constexpr int kBoundBlocks = kSplit && kSlabGroups == 1 ? 2 : 1;
  static constexpr int kLaunchRegisters = kThreads > 512                                 ? 96
                                          : Tile::kMaxColumns <= 32 && kBoundBlocks == 1 ? 128
                                                                                         : 168;
  static constexpr int kBoundThreads = kLaunchRegisters == 128 ? 512 : kThreads;
  static constexpr int kConsumerRegisters = kSlabGroups > 1          ? 112
                                            : Tile::kMaxColumns > 64 ? 232
                                            : Tile::kMaxColumns > 32 ? 208
                                                                     : 152;
  static constexpr int kProducerRegisters =
      kLaunchRegisters - kConsumerWarps / kGroupWarps * (kConsumerRegisters - kLaunchRegisters);
  static_assert(kStages >= 3 && kBytes <= kHopperSharedBytes);
  static_assert(kItemSlots * sizeof(Item) + 12 <= kItemSlots * 32 - kIndexSlots * 4);
};

// Position in a ring of N slots, with the parity its barriers have there. Where N is a power of two
// the number of slots passed says both, in fewer instructions.
template <int N>
struct RingPosition {
  static constexpr bool kCounts = (N & (N - 1)) == 0;
  std::uint32_t at = 0, phase = 0;

  __device__ __forceinline__ std::uint32_t slot() const { return kCounts ? at & (N - 1) : at; }
  __device__ __forceinline__ std::uint32_t parity() const { return kCounts ? at / N & 1 : phase; }
  __device__ __forceinline__ void advance() {
    ++at;
    if (!kCounts && at == N) {
      at = 0;
      phase ^= 1;
    }
  }
};

template <class Format, class Tile>
struct Shared {
  using L = Layout<Format, Tile>;
  std::uint32_t base;  // 1024-aligned shared address
  char* generic;
  const CodeImage& codes;  // the kernel's parameters
  const std::uint8_t& chunks_of_sums;
  // The same for the other matrix.
  __device__ __forceinline__ Shared with(const CodeImage& image) const {
    return {base, generic, image, chunks_of_sums};
  }
  __device__ __forceinline__ std::uint32_t weights(std::uint32_t s, int chunk = 0) const {
    return base + s * L::kStageBytes + static_cast<std::uint32_t>(chunk * L::kPartBytes);
  }
  __device__ __forceinline__ std::uint32_t tokens(std::uint32_t s, int chunk = 0) const {
    return weights(s, chunk) + L::kWeightBytes;
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
  // Behind the items, which leave part of their slots' space unused: of both warpgroups, then
  // of each alone.
  __device__ __forceinline__ volatile std::uint32_t* flag(int place) const {
    return reinterpret_cast<volatile std::uint32_t*>(generic + L::kOffsetItems +
                                                     kItemSlots * sizeof(Item)) +
           place;
  }
  // Indices of items that the first CTA of a pair takes for both: the end of the items' space.
  __device__ __forceinline__ std::uint32_t index_at(std::uint32_t s) const {
    return base + L::kOffsetItems + kItemSlots * 32 - kIndexSlots * 4 + s * 4;
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
  __device__ __forceinline__ std::uint32_t index_full(std::uint32_t s) const {
    return bar(2 * L::kStages + 2 * kItemSlots + s);
  }
  __device__ __forceinline__ SharedList* list() const {
    return reinterpret_cast<SharedList*>(generic + L::kOffsetList);
  }
  // The work list, wherever it is.
  static __device__ __forceinline__ bool has_list(const GroupedParams& p) {
    return L::kMakesList && p.own_list.pairs > 0;
  }
  __device__ __forceinline__ const GroupRecord* groups(const GroupedParams& p) const {
    return has_list(p) ? list()->groups : p.list.groups;
  }
  __device__ __forceinline__ std::uint32_t num_groups(const GroupedParams& p) const {
    return has_list(p) ? list()->num_groups : *p.list.num_groups;
  }
  __device__ __forceinline__ const std::int32_t* pair_of_row(const GroupedParams& p) const {
    return has_list(p) ? list()->pair_of_row : p.list.pair_of_row;
  }
  // Where the results of rows go.
  __device__ __forceinline__ const std::int32_t* place_of_row(const GroupedParams& p) const {
    return has_list(p) ? list()->pair_of_row : p.place_of_row;
  }
  // Null: factor 1.
  __device__ __forceinline__ const float* weight_of_row(const GroupedParams& p) const {
    return has_list(p) ? list()->weight_of_row : p.list.weight_of_row;
  }
  __device__ __forceinline__ CombineParams combine(const GroupedParams& p) const {
    CombineParams c = p.combine;
    if (has_list(p)) c.row_of_pair = list()->row_of_pair;
    return c;
  }
  __device__ __forceinline__ std::uint32_t table() const { return base + L::kOffsetPairs; }
  // Sums of a second block that a warp of the epilogue is given: four of a lane at a time.
  __device__ __forceinline__ float4* sent(int warp) const {
    return reinterpret_cast<float4*>(generic + L::kOffsetSent) +
           warp * (32 * Tile::kMaxColumns / 8);
  }
  __device__ __forceinline__ std::uint32_t sent_full(int warp) const {
    return bar(static_cast<std::uint32_t>(L::kOtherBars + warp));
  }
  __device__ __forceinline__ std::uint32_t sent_empty(int warp) const {
    return bar(static_cast<std::uint32_t>(L::kOtherBars + L::kSentBars + warp));
  }
  // Split builds: the largest magnitudes from both CTAs are there.
  __device__ __forceinline__ std::uint32_t amax_full(std::uint32_t s) const {
    return bar(2 * L::kStages + 2 * kItemSlots + kIndexSlots + s);
  }
};

}  // namespace moesaic::cuda
