// The consumer warpgroups of the grouped-GEMM kernel (grouped_gemm.cuh): multiply-accumulate in
// either orientation, then the epilogue of an item.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/fault.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/decode_codes.cuh"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/epilogue_rows.cuh"
#include "experts/sm90/finish.cuh"
#include "experts/sm90/gemm_fp8_codes.cuh"
#include "experts/sm90/gemm_items.cuh"
#include "experts/sm90/gemm_products.cuh"
#include "experts/sm90/gemm_shares.cuh"
#include "permute/sm90/combine.cuh"

namespace moesaic::cuda {

// The consumer threads, after the stores of a GEMM2 item: the last item of a band sums its columns
// of every token. `alone`: this warpgroup's, of a slab (as in split builds).
template <class Format, class Tile>
__device__ __forceinline__ void combine_band(const GroupedParams& p, const Shared<Format, Tile>& sh,
                                             int band, int group, bool alone) {
  using L = Layout<Format, Tile>;
  const bool slab = L::kSplit || (L::kSlabItems && alone);
  constexpr int kTokens = 8;  // at a time, a thread for 8 columns of each
  const int rows = slab ? kBandRows / 2 : kBandRows, threads = rows;
  static_assert(L::kEpilogueThreads == (L::kSplit ? kBandRows / 2 : kBandRows));
  const int part = slab ? 2 * band + group : band;
  const int place = L::kSlabItems && alone ? group : 0;
  // Other warps may yet read the one of both warpgroups.
  const int flag = L::kSlabItems && alone ? 1 + group : 0;
  const int barrier = L::kSlabItems && alone ? kSlabBarrier + group : kRequantBarrier;
  const int thread = static_cast<int>(threadIdx.x) - place * threads;
  ptx::named_barrier_sync(barrier, threads);
  if (thread == 0) {
    *sh.flag(flag) = ptx::add_acq_rel(p.band_done + part, 1) + 1 == sh.num_groups(p) ? 1 : 0;
  }
  ptx::named_barrier_sync(barrier, threads);
  if (*sh.flag(flag) == 0) return;
  const std::int64_t column =
      static_cast<std::int64_t>(part) * rows + thread % (rows / kTokens) * 8;
  if (column >= p.hidden) return;
  const CombineParams c = sh.combine(p);
  for (std::int64_t t = thread / (rows / kTokens); t < c.tokens; t += kTokens)
    combine_columns<FormatSizes<Format>::kWideResult>(c, t, column);
}

// After the stores of a GEMM1 item: tells GEMM2.
template <class Inner, class Tile, class Shared>
__device__ __forceinline__ void hand_over(const GroupedParams& p, const Shared& sh,
                                          const Item& item, int lane) {
  if constexpr (Inner::kWholeRow) {
    hand_over_whole_rows<Inner, Tile>(p, sh, item, lane);
  } else {
    __syncwarp();
    if (lane == 0) ptx::add_release(p.list.group_done + item.group, 1);
  }
}

template <class Format, class Tile, class Epilogue, int kColumns>
__device__ __forceinline__ void consume_item(const GroupedParams& p, const Shared<Format, Tile>& sh,
                                             RingPosition<Layout<Format, Tile>::kStages>& ring,
                                             RingPosition<2>& exchange, RingPosition<1>& sent,
                                             const Item& item, int group, int warp, int lane) {
  using L = Layout<Format, Tile>;
  const bool second = item.band >= p.bands1;
  const auto band = [&] { return second ? band_of_w2<L::kSlabItems>(p, item) : item.band; };
  constexpr int kLists = (kColumns + 31) / 32;
  using Inner = typename Format::Inner;
  constexpr bool kWide = FormatSizes<Format>::kWideResult;
  // Where weights are decoded there is no register for it.
  constexpr bool kStreams = Format::Weights::kTokensAsRows && Tile::kMaxColumns > 64;
  typename Format::Promote::Sum acc[2][kColumns / 2];
  constexpr bool kFactors = Format::Tokens::kFactors;
  [[maybe_unused]] ColumnFactors<typename Format::Tokens, kLists> factors;
  using Weights = typename Format::Weights;
  // Decoders are long: one loop for both GEMMs.
  constexpr bool kOneLoop = !Weights::kTokensAsRows;
  if constexpr (kOneLoop) {
    // What the epilogue reads is read when registers are free again, but near by then: 16 bytes of
    // a list by each lane.
    if (second && 4 * lane < item.rows) {
      const std::int32_t at = item.first_row + 4 * lane;
      ptx::prefetch_l1(sh.place_of_row(p) + at);
      if (sh.weight_of_row(p) != nullptr) ptx::prefetch_l1(sh.weight_of_row(p) + at);
    }
    if constexpr (kFactors) {
      factors.template load_weights<true>(p, item, band(), second, Epilogue::kGated && !second,
                                          group, warp & 3, lane);
    }
    const bool has_sums =
        multiply_codes<Format, Tile, kColumns>(p, sh, ring, sent, second, group, warp, lane, acc);
    if (!has_sums) return;
  }
  if constexpr (kFactors) {
    factors.load_weights(p, item, band(), second, Epilogue::kGated && !second, group, warp & 3,
                         lane);
    if (!second) factors.load_tokens(p, sh.pair_of_row(p), item, false, lane);
  }
  const auto multiply = [&](int chunks, bool scale_by_row_half) {
    if constexpr (!kOneLoop) {
      Weights::template columns<Format, Tile, kColumns>(sh, ring, chunks, group, lane,
                                                        scale_by_row_half, acc);
    }
  };
  if (second) {
    // Destination and factor of column `lane + 32 i`.
    std::int32_t pair[kLists];
    float factor[kLists];
    const std::int32_t* const place_of_row = sh.place_of_row(p);
    const float* const weight_of_row = sh.weight_of_row(p);
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      const int column = lane + 32 * i;
      const bool valid = column < item.rows;
      pair[i] = valid ? place_of_row[item.first_row + column] : -1;
      factor[i] = valid && weight_of_row != nullptr ? weight_of_row[item.first_row + column] : 1.0F;
      MOESAIC_CUDA_FAULT(cuda_experts_router_weight_missing, factor[i] = 1.0F;)
    }
    multiply(p.chunks2, false);
    if constexpr (kFactors) {
      factors.load_tokens(p, place_of_row, item, true, lane);
      float finished[2][kColumns / 2];
      finish_columns<kColumns>(factors, lane, acc, finished);
      store_weighted<kWide, kStreams, kColumns>(p, item.expert, band(), group, warp & 3, lane, pair,
                                                factor, finished);
    } else {
      store_weighted<kWide, kStreams, kColumns>(p, item.expert, band(), group, warp & 3, lane, pair,
                                                factor, acc);
    }
    if (!Tile::kPaired && Tile::kMaxColumns <= 64 && p.fold_combine)
      combine_band(p, sh, band(), group, takes_slabs<Format, Tile>(p, sh.num_groups(p)));
  } else {
    multiply(p.chunks1, Epilogue::kGated);
    const AmaxExchange<L::kSplit> amax(sh, exchange);
    if constexpr (kFactors) {
      float finished[2][kColumns / 2];
      finish_columns<kColumns>(factors, lane, acc, finished);
      store_activated<Inner, Epilogue, kColumns>(p, item.expert, item.band, item.first_row,
                                                 item.rows, group, warp & 3, lane, amax, finished);
    } else {
      store_activated<Inner, Epilogue, kColumns>(p, item.expert, item.band, item.first_row,
                                                 item.rows, group, warp & 3, lane, amax, acc);
    }
    hand_over<Inner, Tile>(p, sh, item, lane);
  }
}

// An item with the tokens as the M operand.
template <class Format, class Tile>
__device__ __forceinline__ void consume_rows(const GroupedParams& p, const Shared<Format, Tile>& sh,
                                             RingPosition<Layout<Format, Tile>::kStages>& ring,
                                             const Item& item, int group, int warp, int lane) {
  const bool second = item.band >= p.bands1;
  const int row = group * 64 + (warp & 3) * 16 + (lane >> 2);
  constexpr bool kWide = FormatSizes<Format>::kWideResult;
  typename Format::Promote::Sum acc[128];
  constexpr bool kFactors = Format::Tokens::kFactors;
  if (second) {
    std::int32_t pair[2];
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = item.first_row + row + 8 * i;
      const bool valid = row + 8 * i < item.rows;
      pair[i] = valid ? p.place_of_row[at] : -1;
      factor[i] = valid && p.list.weight_of_row != nullptr ? p.list.weight_of_row[at] : 1.0F;
    }
    Format::Weights::rows(sh, ring, p.chunks2, group, row, lane, false, acc);
    if constexpr (kFactors) {
      float finished[128];
      finish_rows(p, p.list.pair_of_row, item, true, row, lane, acc, finished);
      store_weighted_rows<kWide>(p, item.expert, item.band - p.bands1, lane, pair, factor,
                                 finished);
    } else {
      store_weighted_rows<kWide>(p, item.expert, item.band - p.bands1, lane, pair, factor, acc);
    }
  } else {
    Format::Weights::rows(sh, ring, p.chunks1, group, row, lane, true, acc);
    if constexpr (kFactors) {
      float finished[128];
      finish_rows(p, p.list.pair_of_row, item, false, row, lane, acc, finished);
      store_activated_rows<typename Format::Inner>(p, item.expert, item.band, item.first_row + row,
                                                   item.rows - row, lane, finished);
    } else {
      store_activated_rows<typename Format::Inner>(p, item.expert, item.band, item.first_row + row,
                                                   item.rows - row, lane, acc);
    }
    hand_over<typename Format::Inner, Tile>(p, sh, item, lane);
  }
}

// Calls `with` for the fewest of ascending numbers of columns that hold `rows`.
template <int kColumns, int... kMore, class With>
__device__ __forceinline__ void with_columns(int rows, const With& with) {
  if constexpr (sizeof...(kMore) == 0) {
    with(std::integral_constant<int, kColumns>{});
  } else if (rows <= kColumns) {
    with(std::integral_constant<int, kColumns>{});
  } else {
    with_columns<kMore...>(rows, with);
  }
}

template <class Format, class Tile, class Epilogue>
__device__ __forceinline__ void consume(const GroupedParams& p, const Shared<Format, Tile>& sh,
                                        int warp, int lane) {
  using L = Layout<Format, Tile>;
  RingPosition<L::kStages> ring;
  RingPosition<kItemSlots> slot;
  RingPosition<2> exchange;
  // Lane 0's: so the compiler sees that the warp agrees.
  const int group = __shfl_sync(
      0xFFFFFFFFU, L::kSplit ? static_cast<int>(ptx::cluster_cta_rank()) : (warp >> 2) & 1, 0);
  RingPosition<1> sent;
  if (!Tile::kPaired && Tile::kMaxColumns <= 64 && p.fold_combine && sh.num_groups(p) == 0 &&
      warp < L::kEpilogueWarps) {
    // No token has an expert here, but every output must be written.
    constexpr bool kWide = FormatSizes<Format>::kWideResult;
    const std::int64_t vectors = p.hidden / 8;
    constexpr int kThreads = L::kEpilogueThreads;
    const CombineParams combine = sh.combine(p);
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         i < combine.tokens * vectors; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
      combine_columns<kWide>(combine, i / vectors, i % vectors * 8);
    }
  }
  while (true) {
    Item item = take_item(sh, slot, lane);
    while (L::kSlabItems && is_slab(item) && ((item.band - p.bands1) & 1) != group) {
      pass_item(sh, ring, p.chunks2, lane);
      item = take_item(sh, slot, lane);
    }
    if (item.band < 0) break;
    const auto with = [&](auto columns) {
      consume_item<Format, Tile, Epilogue, decltype(columns)::value>(p, sh, ring, exchange, sent,
                                                                     item, group, warp, lane);
    };
    // Any choice of columns gives the same bits.
    int rows = item.rows;
    constexpr bool kRows = Format::Weights::kTokensAsRows;
    constexpr int kWidest = Tile::kMaxColumns;
    if constexpr (L::kSplit) {
      with_columns<8, 16>(rows, with);
    } else if constexpr (kWidest <= 32) {
      with_columns<8, 16, 32>(rows, with);
    } else if constexpr (kWidest <= 48) {
      with_columns<16, 32, 48>(rows, with);
    } else if constexpr (kWidest <= 64) {
      with_columns<16, 32, 48, 64>(rows, with);
    } else if constexpr (kRows && Epilogue::kFullGroups) {
      MOESAIC_CUDA_FAULT(cuda_experts_wide_groups_lose_columns, rows = min(rows, 128);)
      if (rows > kRowsOrientation && (kWidest <= 128 || rows <= 128)) {
        consume_rows(p, sh, ring, item, group, warp, lane);
      } else if constexpr (kWidest <= 128) {
        with_columns<16, 48, 64, 80, 96>(rows, with);
      } else {
        with_columns<16, 64, 80, 96, kWidest>(rows, with);
      }
    } else if constexpr (kWidest <= 128) {
      with_columns<16, 48, 64, 80, 96, 128>(rows, with);
    } else {
      // Few columns of decoded weights take as long as 64: decoding does.
      MOESAIC_CUDA_FAULT(cuda_experts_wide_groups_lose_columns, rows = min(rows, 128);)
      if constexpr (kWidest <= 144) {
        with_columns<64, 80, 96, 128, kWidest>(rows, with);
      } else {
        with_columns<64, 80, 96, 128, 144, kWidest>(rows, with);
      }
    }
  }
}

}  // namespace moesaic::cuda
