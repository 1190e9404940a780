// Panel GEMM on the bf16 dot-product instruction (AVX512_BF16 with AVX512_VBMI): two steps of k per
// lane and instruction. Products of bf16 values are exact in fp32; the instruction flushes
// subnormal inputs and results.
//
// Two regimes with the same arithmetic, hence the same bits:
//   stream  1 or 2 rows: all groups in one loop, results in registers; limited by memory
//   block   3 rows and more: a group of weights stays in L1 while tiles of up to 6 rows pass over
//           it, and the tiles spread the prefetch of the next group between them; limited by the
//           multiply-adds
#if defined(MOESAIC_CPU_PANEL_GEMM_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_BF16_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_BF16_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_BF16_INL_H_
#endif

#include <cstring>

#include "cpu/panel_gemm-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

HWY_INLINE __m512 DotPair(__m512 acc, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}

// The bf16 pair at steps k, k+1 of a row, in every lane.
HWY_INLINE __m512i BroadcastPair(const std::uint16_t* row, std::int64_t k) {
  std::int32_t pair;
  std::memcpy(&pair, row + k, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

template <int MR>
HWY_INLINE void PairRows(const PanelArgs& args, int row, std::int64_t group,
                         const std::uint16_t* (&a)[MR]) {
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const std::uint16_t*>(args.rows[row + r]) + group * kGroup;
}

// Two steps of k of MR rows and all 64 columns.
template <int MR>
HWY_INLINE void DotRows(const __m512i (&wv)[4], const std::uint16_t* const (&a)[MR], std::int64_t k,
                        VF (&acc)[MR][4]) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    const __m512i x = BroadcastPair(a[r], k);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) acc[r][v].raw = DotPair(acc[r][v].raw, wv[v], x);
  }
}

// The same, weights in bf16.
template <int MR>
HWY_INLINE void StepBF16(const std::byte* w, const std::uint16_t* const (&a)[MR], std::int64_t k,
                         VF (&acc)[MR][4]) {
  __m512i wv[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) wv[v] = _mm512_load_si512(w + 64 * v);
  DotRows<MR>(wv, a, k, acc);
}

// Four steps of k of MR rows, weights decoded in registers.
template <int MR>
HWY_INLINE void StepE4M3(const TablesE4M3& tables, const std::byte* w,
                         const std::uint16_t* const (&a)[MR], std::int64_t k, VF (&acc)[MR][4]) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    __m512i pair01, pair23;
    DecodePairs(tables, _mm512_load_si512(w + 64 * v), pair01, pair23);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
      acc[r][v].raw = DotPair(acc[r][v].raw, pair01, BroadcastPair(a[r], k));
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
      acc[r][v].raw = DotPair(acc[r][v].raw, pair23, BroadcastPair(a[r], k + 2));
  }
}

template <WeightKind kKind>
constexpr int kPairSteps = kKind == WeightKind::kBF16 ? 2 : 4;

// Stream regime: into L2, the latency of memory times the bandwidth of one core ahead. Measured on
// one core: 4 KiB into L2 equals a pure read; 16 KiB, or into L1, is 3 to 10 % slower.
constexpr std::int64_t kStreamPrefetchBytes = 4096;

template <WeightKind kKind, int MR>
HWY_NOINLINE void StreamPair(const PanelArgs& args) {
  const TablesE4M3 tables = LoadTablesE4M3();
  VF total[MR][4];
  ClearTile<MR>(total);
  const std::byte* w = args.panel;
  std::int64_t group = 0;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += kGroup, ++group) {
    const std::int64_t k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    const std::uint16_t* a[MR];
    PairRows<MR>(args, 0, group, a);
    VF acc[MR][4];
    ClearTile<MR>(acc);
    for (std::int64_t k = 0; k < k_count; k += kPairSteps<kKind>, w += kUnitBytes) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line)
        __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
      if constexpr (kKind == WeightKind::kBF16) {
        StepBF16<MR>(w, a, k, acc);
      } else {
        StepE4M3<MR>(tables, w, a, k, acc);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      alignas(16) float scales[4];
      StripScales(args, r, group, scales);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v)
        total[r][v] = hn::MulAdd(acc[r][v], hn::Set(df, scales[v]), total[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      hn::Store(total[r][v], df, args.result + r * kPanelColumns + 16 * v);
  }
}

// Block regime: the tile's place in the group and what it fetches for the next one.
struct BlockTile {
  const std::byte* w = nullptr;         // the group's first unit
  std::uint32_t* decoded = nullptr;     // e4m3: where the first tile leaves the group as bf16 units
  const std::byte* prefetch = nullptr;  // kLines cache lines per unit from here on
  const float* factors = nullptr;       // see FoldFactors; null: StripScales
  std::int64_t group = 0, k_count = 0;
  int row = 0;
};

// row_scale * panel_scale of four groups for every row, [row][group % 4][strip]: one multiplication
// yields the 16 factors for which the tiles would need four. Multiplications are what is scarce.
struct FoldFactors {
  HWY_ALIGN float of[kMaxRows * 16];

  HWY_INLINE void Load(const PanelArgs& args, std::int64_t group) {
    const auto lanes = static_cast<unsigned>(
        HWY_MIN(args.padded_k / kGroup + (args.padded_k % kGroup != 0) - group, 4));
    const auto first = static_cast<__mmask8>((1U << lanes) - 1U);
    const auto all = static_cast<__mmask16>((1U << 4 * lanes) - 1U);
    const __m512 panel = _mm512_maskz_loadu_ps(all, args.panel_scales + group * 4);
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    for (int r = 0; r < args.num_rows; ++r) {
      const __m512 row =
          _mm512_castps128_ps512(_mm_maskz_loadu_ps(first, args.row_scales[r] + group));
      _mm512_store_ps(of + 16 * r, _mm512_mul_ps(panel, _mm512_permutexvar_ps(spread, row)));
    }
  }
};

template <int MR>
HWY_INLINE void FoldTile(const VF (&acc)[MR][4], const PanelArgs& args, const BlockTile& tile) {
  if (tile.factors == nullptr) return Fold<MR, 4>(acc, args, tile.row, 0, tile.group);
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    const float* factors = tile.factors + (tile.row + r) * 16;
    float* c = args.result + static_cast<std::int64_t>(tile.row + r) * kPanelColumns;
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      hn::Store(hn::MulAdd(acc[r][v], hn::Set(df, factors[v]), hn::Load(df, c + 16 * v)), df,
                c + 16 * v);
    }
  }
}

// A unit of codes as two bf16 units. Only the first half of each table is in a register: tiles of 6
// rows have room for no more, and a permute takes the second half from memory for free.
HWY_INLINE void DecodeUnit(__m512i high0, __m512i low0, const std::byte* w,
                           std::uint32_t* decoded) {
  const BytesE4M3* tables = &kE4M3ToBF16;
  __asm__("" : "+r"(tables));  // or the compiler finds them registers, at the price of others
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    __m512i raw = _mm512_load_si512(w + 64 * v);
    __asm__("" : "+v"(raw));  // or it is loaded three times
    const __m512i low = _mm512_permutex2var_epi8(low0, raw, _mm512_load_si512(tables->low + 64));
    __m512i high = _mm512_permutex2var_epi8(high0, raw, _mm512_load_si512(tables->high + 64));
    high = _mm512_ternarylogic_epi32(high, raw, sign, 0xF8);  // high | (raw & sign)
    _mm512_store_si512(decoded + 16 * v, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(decoded + kPanelColumns + 16 * v, _mm512_unpackhi_epi8(low, high));
  }
}

template <WeightKind kKind, int MR, int kLines>
HWY_NOINLINE void RunBlockTile(const PanelArgs& args, const BlockTile& tile) {
  [[maybe_unused]] const __m512i high0 = _mm512_load_si512(kE4M3ToBF16.high);
  [[maybe_unused]] const __m512i low0 = _mm512_load_si512(kE4M3ToBF16.low);
  const std::uint16_t* a[MR];
  PairRows<MR>(args, tile.row, tile.group, a);
  VF acc[MR][4];
  ClearTile<MR>(acc);
  const std::byte* w = tile.w;
  const std::byte* fetch = tile.prefetch;
  std::uint32_t* decoded = tile.decoded;
  if constexpr (kKind != WeightKind::kBF16) DecodeUnit(high0, low0, w, decoded);
  for (std::int64_t k = 0; k < tile.k_count; k += kPairSteps<kKind>, w += kUnitBytes) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(fetch + 64 * line);
    fetch += 64 * kLines;
    if constexpr (kKind == WeightKind::kBF16) {
      StepBF16<MR>(w, a, k, acc);
    } else {
      // One unit ahead of the multiply-adds, which read what was decoded a unit ago.
      if (k + 4 < tile.k_count)
        DecodeUnit(high0, low0, w + kUnitBytes, decoded + 2 * kPanelColumns);
      StepBF16<MR>(reinterpret_cast<const std::byte*>(decoded), a, k, acc);
      StepBF16<MR>(reinterpret_cast<const std::byte*>(decoded + kPanelColumns), a, k + 2, acc);
      decoded += 2 * kPanelColumns;
    }
  }
  FoldTile<MR>(acc, args, tile);
}

using BlockTileFn = void (*)(const PanelArgs&, const BlockTile&);
template <WeightKind kKind, int kLines>
constexpr BlockTileFn kBlockTiles[7] = {nullptr,
                                        RunBlockTile<kKind, 1, kLines>,
                                        RunBlockTile<kKind, 2, kLines>,
                                        RunBlockTile<kKind, 3, kLines>,
                                        RunBlockTile<kKind, 4, kLines>,
                                        RunBlockTile<kKind, 5, kLines>,
                                        RunBlockTile<kKind, 6, kLines>};
template <int kLines>
constexpr BlockTileFn kDecodeTiles[7] = {nullptr,
                                         RunBlockTile<WeightKind::kE4M3, 1, kLines>,
                                         RunBlockTile<WeightKind::kE4M3, 2, kLines>,
                                         RunBlockTile<WeightKind::kE4M3, 3, kLines>,
                                         RunBlockTile<WeightKind::kE4M3, 4, kLines>,
                                         RunBlockTile<WeightKind::kE4M3, 5, kLines>,
                                         RunBlockTile<WeightKind::kE4M3, 6, kLines>};

// bf16 tiles of nearly equal height over rows [row, num_rows); tile i of the first `fetchers`
// fetches kLines lines a unit. Small tiles are short of independent chains, so 32 rows are
// 6,6,5,5,5,5 and not 6,6,6,6,6,2.
template <int kLines>
HWY_INLINE void BalancedTiles(const PanelArgs& args, BlockTile tile, int fetchers) {
  const int rows = args.num_rows - tile.row;
  const int tiles = (rows + 5) / 6;
  const int units = static_cast<int>(tile.k_count / 2);
  for (int i = 0; i < tiles; ++i) {
    const int height = rows / tiles + (i < rows % tiles ? 1 : 0);
    if (i < fetchers) {
      kBlockTiles<WeightKind::kBF16, kLines>[height](args, tile);
      tile.prefetch += static_cast<std::int64_t>(units) * kLines * 64;
    } else {
      kBlockTiles<WeightKind::kBF16, 0>[height](args, tile);
    }
    tile.row += height;
  }
}

void PanelGemmPairBF16(const PanelArgs& args) {
  if (args.num_rows == 1) return StreamPair<WeightKind::kBF16, 1>(args);
  if (args.num_rows == 2) return StreamPair<WeightKind::kBF16, 2>(args);
  ClearResult(args);
  BlockTile tile;
  tile.w = args.panel;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += kGroup, ++tile.group) {
    tile.k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    const std::byte* next = tile.w + tile.k_count / 2 * kUnitBytes;
    tile.prefetch = next;
    if (args.num_rows <= 6) {
      BalancedTiles<4>(args, tile, 1);
    } else if (args.num_rows <= 18) {
      BalancedTiles<2>(args, tile, 2);
    } else {
      BalancedTiles<1>(args, tile, 4);
    }
    tile.w = next;
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
