// Panel GEMM of e4m3 weights on the bf16 dot product: which tiles a panel is cut into. Steps, tiles
// and decoding: panel_gemm_bf16-inl.h.
#if defined(MOESAIC_CPU_PANEL_GEMM_E4M3_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_E4M3_BF16_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_E4M3_BF16_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_E4M3_BF16_INL_H_
#endif

#include <cstring>

#include "cpu/panel_gemm_bf16-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// 7 to 10 rows of e4m3: all of them in one tile of 32 columns at a time, so that nothing decoded
// needs to be kept and every decoded register meets all rows.
template <int MR>
HWY_NOINLINE void RunWideTile(const PanelArgs& args, const BlockTile& tile) {
  const TablesE4M3 tables = LoadTablesE4M3();
  // One base address for all rows: as many row pointers would be reloaded at every use.
  HWY_ALIGN std::uint16_t a[MR][kGroup];
  for (int r = 0; r < MR; ++r) {
    const auto* row = static_cast<const std::uint16_t*>(args.rows[r]) + tile.group * kGroup;
    std::memcpy(a[r], row, static_cast<std::size_t>(tile.k_count) * sizeof(std::uint16_t));
  }
  const std::byte* fetch = tile.prefetch;
  for (int half = 0; half < 2; ++half) {
    VF acc[MR][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r][0] = acc[r][1] = hn::Zero(df);
    const std::byte* w = tile.w + half * kUnitBytes / 2;
    for (std::int64_t k = 0; k < tile.k_count; k += 4, w += kUnitBytes) {
      __builtin_prefetch(fetch);
      __builtin_prefetch(fetch + 64);
      fetch += 128;
      __m512i pair01[2], pair23[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        DecodePairs(tables, _mm512_load_si512(w + 64 * v), pair01[v], pair23[v]);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const __m512i x = BroadcastPair(a[r], k);
        acc[r][0].raw = DotPair(acc[r][0].raw, pair01[0], x);
        acc[r][1].raw = DotPair(acc[r][1].raw, pair01[1], x);
      }
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const __m512i x = BroadcastPair(a[r], k + 2);
        acc[r][0].raw = DotPair(acc[r][0].raw, pair23[0], x);
        acc[r][1].raw = DotPair(acc[r][1].raw, pair23[1], x);
      }
    }
    Fold<MR, 2>(acc, args, 0, kPanelColumns / 2 * half, tile.group);
  }
}

constexpr int kMinWideRows = 7, kMaxWideRows = 10;
constexpr BlockTileFn kWideTiles[] = {RunWideTile<7>, RunWideTile<8>, RunWideTile<9>,
                                      RunWideTile<10>};

void PanelGemmPairE4M3(const PanelArgs& args) {
  if (args.num_rows == 1) return StreamPair<WeightKind::kE4M3, 1>(args);
  if (args.num_rows == 2) return StreamPair<WeightKind::kE4M3, 2>(args);
  ClearResult(args);
  HWY_ALIGN std::uint32_t block[kGroup / 2 * kPanelColumns];  // 16 KiB, L1
  const int first = HWY_MIN(args.num_rows, 6);
  FoldFactors factors;
  const bool scaled = args.row_scales != nullptr && args.panel_scales != nullptr;
  BlockTile tile;
  tile.w = args.panel;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += kGroup, ++tile.group) {
    tile.k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    const std::byte* next = tile.w + tile.k_count / 4 * kUnitBytes;
    if (scaled) {
      if (tile.group % 4 == 0) factors.Load(args, tile.group);
      tile.factors = factors.of + tile.group % 4 * 4;
    }
    BlockTile decode = tile;
    decode.decoded = block;
    decode.prefetch = next;
    tile.row = first;
    tile.prefetch = next;
    if (args.num_rows >= kMinWideRows && args.num_rows <= kMaxWideRows) {
      kWideTiles[args.num_rows - kMinWideRows](args, decode);
    } else if (first == args.num_rows) {
      kDecodeTiles<4>[first](args, decode);
    } else {
      kDecodeTiles<0>[first](args, decode);
      BlockTile rest = tile;
      rest.w = reinterpret_cast<const std::byte*>(block);
      if (args.num_rows - first <= 6) {
        BalancedTiles<2>(args, rest, 1);
      } else {
        BalancedTiles<1>(args, rest, 2);
      }
    }
    tile.row = 0;
    tile.w = next;
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
