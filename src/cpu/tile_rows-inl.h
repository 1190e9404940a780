// How the rows of a panel GEMM are cut into tiles, and the shapes of the tile registers.
#if defined(MOESAIC_CPU_TILE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_TILE_ROWS_INL_H_
#undef MOESAIC_CPU_TILE_ROWS_INL_H_
#else
#define MOESAIC_CPU_TILE_ROWS_INL_H_
#endif

#include <algorithm>

#include "cpu/simd-inl.h"
#include "cpu/tile_config.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

constexpr int kTileFloats = kTileRows * 16;  // of a tile of sums

// Rows in tiles of equal height. The last tile ends with the last row: rows that it shares with the
// one before are computed twice and folded once.
struct TileCut {
  explicit TileCut(int num_rows)
      : rows(num_rows),
        count((num_rows + kTileRows - 1) / kTileRows),
        height((num_rows + count - 1) / count) {}
  int rows, count, height;
  int first(int tile) const { return std::min(tile * height, rows - height); }
  // Rows of a tile that are another's.
  int shared(int tile) const {
    return MOESAIC_FAULT(cpu_tiles_fold_shared_rows) ? 0 : tile * height - first(tile);
  }
};

// C 0 to 3, A 4 and 5, B 6 and 7.
HWY_INLINE TileConfig MakeTileConfig(int height, int tile_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, height, kTileBytes);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, height, tile_bytes);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, tile_bytes / 4, kTileBytes);
  return config;
}

// The distance of rows that tiles load where they lie: evenly spaced, and not so that they meet in
// a few sets of the cache. 0: they are copied.
HWY_INLINE std::int64_t RowPitch(const PanelArgs& args) {
  const auto at = [&](int r) { return static_cast<const std::byte*>(args.rows[r]); };
  if (args.num_rows == 1) return kTileBytes;
  const std::int64_t pitch = at(1) - at(0);
  for (int r = 2; r < args.num_rows; ++r) {
    if (at(r) - at(r - 1) != pitch) return 0;
  }
  return args.num_rows > 4 && pitch % 1024 == 0 ? 0 : pitch;
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
