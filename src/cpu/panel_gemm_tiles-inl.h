// Panel GEMMs on tile registers, for bf16 and int8 operands and every format of
// panel_sources_tiles-inl.h. `Tiles` are the instructions (tiles_amx-inl.h), or a model of them in
// tests.
//
// A block of weights (128 steps, or more where no scale wants a fold before) meets tiles of up to
// 16 rows, two by two with halves of the panel's columns, or a single one with all of them. What a
// tile product computes of a row does not depend on the others, so a row's bits depend on that row
// and the weights only; every number of rows takes tiles, because other instructions add bf16
// products in another order. Integer sums are exact: those of groups with scales have the bits of
// panel_gemm_i8-inl.h, which few rows take.
#if defined(MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "core/checked.h"
#include "cpu/panel_sources_tiles-inl.h"
#include "cpu/tiers.h"
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

template <class Tiles, class Source>
class TileGemm {
  using Operand = typename Source::Operand;
  using Sum = typename Operand::Sum;
  static constexpr int kBlockBytes = Source::kBlockBytes;
  static constexpr int kBlockSteps = kBlockBytes / Operand::kStepBytes;
  static constexpr int kFinest = 16;  // steps of a fold

 public:
  TileGemm(const PanelArgs& args, bool scaled)
      : args_(args),
        source_(args),
        cut_(args.num_rows),
        scaled_(scaled),
        fold_steps_(scaled ? args.fold : kBlockSteps),
        block_steps_(!scaled               ? kBlockSteps
                     : Source::kHoldsGroup ? args.fold
                                           : kGroup),
        tile_bytes_(std::min(fold_steps_ * Operand::kStepBytes, kTileBytes)),
        pitch_(Operand::kStepBytes == 2 ? RowPitch(args) : 0) {}

  // False: see Pairs::Begin.
  bool Run() {
    ClearResult(args_);
    Tiles::Configure(MakeTileConfig(cut_.height, tile_bytes_));
    bool ok = BeginUnits(args_.panel, 0);
    for (std::int64_t k0 = 0; ok && k0 < args_.padded_k; k0 += block_steps_) {
      FinishUnits();
      SetBlock(k0);
      const std::byte* end = units_.next;
      ok = BeginUnits(end, k0 + block_steps_);
      if (ok) RunBlock(end);
    }
    FoldPending();
    Tiles::Release();
    return ok;
  }

 private:
  struct Block {
    const std::byte* units = nullptr;
    const float* scales = nullptr;  // [folds][64]
    std::int64_t k0 = 0, count = 0, padded = 0;
    std::int64_t group = 0;  // the first fold's
    int folds = 1;
    int products = 1;  // per fold
  };
  // Sums that lie in memory and wait for their fold until the products after them are on their way.
  struct Pending {
    int row_tiles = 0;  // 0: none
    int tile = 0, column = 0;
    const float* scales = nullptr;
    std::int64_t group = 0, k0 = 0;
    int starts = 0;  // groups of args.fold steps
  };

  // The units of a block that tiles do not read yet: decoded on the way, if they are codes.
  struct Units {
    const std::byte* w = nullptr;     // what is left of them in the panel
    const std::byte* next = nullptr;  // where they end
    std::byte* out = nullptr;         // where what is left goes
    const std::byte* block = nullptr;
    std::int64_t count = 0, padded = 0;
    int buffer = 0;
  };

  // Steps from k0 on, whose first unit is w; none beyond the end.
  HWY_INLINE bool BeginUnits(const std::byte* w, std::int64_t k0) {
    const std::int64_t tile_steps = tile_bytes_ / Operand::kStepBytes;
    units_.count = std::clamp<std::int64_t>(args_.padded_k - k0, 0, block_steps_);
    units_.padded = round_up(units_.count, tile_steps);
    units_.w = w;
    units_.next = w + units_.count / Source::kSteps * kUnitBytes;
    units_.buffer = 1 - units_.buffer;
    units_.out = decoded_ + units_.buffer * kUnitsBytes;
    const bool in_place = !Source::kDecodes && units_.count == units_.padded;
    units_.block = in_place ? w : units_.out;
    if (in_place) units_.w = units_.next;
    return units_.count == 0 || source_.Begin(args_, k0);
  }
  HWY_INLINE void DecodeSome(std::int64_t count) {
    count = std::min<std::int64_t>(count, (units_.next - units_.w) / kUnitBytes);
    source_.Decode(units_.w, count, units_.out);
    units_.w += count * kUnitBytes;
    units_.out += count * Source::kExpands * kUnitBytes;
  }
  // All of them, and zeros up to a whole number of tiles.
  HWY_INLINE void FinishUnits() {
    if (units_.block != decoded_ + units_.buffer * kUnitsBytes) return;
    DecodeSome(kBlockSteps);
    const std::int64_t bytes = (units_.padded - units_.count) * Operand::kStepBytes;
    std::memset(units_.out, 0, static_cast<std::size_t>(bytes / 4 * kUnitBytes));
  }

  // The finished units become the block from step k0 on.
  HWY_INLINE void SetBlock(std::int64_t k0) {
    const std::int64_t tile_steps = tile_bytes_ / Operand::kStepBytes;
    block_.k0 = k0;
    block_.count = units_.count;
    block_.padded = units_.padded;
    block_.units = units_.block;
    block_.group = k0 / fold_steps_;
    block_.folds = static_cast<int>(ceil_div(block_.count, std::int64_t{fold_steps_}));
    block_.products = static_cast<int>(block_.padded / tile_steps) / block_.folds;
    // Not the one that the fold that waits reads.
    const int buffer = MOESAIC_FAULT(cpu_tiles_scales_of_next_block) ? 0 : units_.buffer;
    float* scales = scales_ + buffer * (kGroup / kFinest) * kPanelColumns;
    block_.scales = scales;
    if (!scaled_) {
      for (int c = 0; c < kPanelColumns; c += kLanes) hn::Store(hn::Set(df, 1.0F), df, scales + c);
      return;
    }
    PrefetchGroups(args_, block_.group + block_.folds, block_.folds);
    const float* first = Source::Scales(args_, block_.group, scales);
    if (first != scales) {
      block_.scales = first;  // in the panel's own
      return;
    }
    for (int f = 1; f < block_.folds; ++f)
      Source::Scales(args_, block_.group + f, scales + f * kPanelColumns);
  }

  // All tiles of rows over the block. On the way the next one is decoded, and what comes after it
  // (of codes; else the next one) asked of memory.
  HWY_INLINE void RunBlock(const std::byte* block_end) {
    const int pairs = cut_.count / 2;
    const int turns = (2 * pairs + cut_.count % 2) * block_.folds * block_.products;
    const auto bytes = block_.count / Source::kSteps * kUnitBytes;
    fetch_ = Source::kDecodes ? units_.next : block_end;
    fetch_end_ = fetch_ + bytes;
    fetch_lines_ = (static_cast<int>(bytes / 64) + turns - 1) / turns;
    units_per_turn_ = (static_cast<int>(bytes / kUnitBytes) + turns - 1) / turns;
    for (int tile = 0; tile < cut_.count; tile += 2) {
      const bool pair = tile + 1 < cut_.count;
      const std::byte* a[2] = {};
      std::int64_t pitch = pitch_;
      if (pitch_ != 0 && block_.count == block_.padded) {
        for (int i = 0; i < (pair ? 2 : 1); ++i) {
          a[i] = static_cast<const std::byte*>(args_.rows[cut_.first(tile + i)]) +
                 block_.k0 * Operand::kStepBytes;
        }
      } else {
        pitch = block_.padded * Operand::kStepBytes;
        for (int i = 0; i < (pair ? 2 : 1); ++i) {
          a[i] = rows_ + i * kTileRows * kBlockBytes;
          CopyRows(cut_.first(tile + i), rows_ + i * kTileRows * kBlockBytes);
        }
      }
      if (pair) {
        RunTiles<2>(tile, a, pitch);
      } else {
        RunTiles<1>(tile, a, pitch);
      }
    }
  }

  HWY_INLINE void CopyRows(int first, std::byte* out) {
    const std::int64_t pitch = block_.padded * Operand::kStepBytes;
    const std::int64_t bytes = block_.count * Operand::kStepBytes;
    for (int r = 0; r < cut_.height; ++r, out += pitch) {
      Operand::CopyRow(args_, args_.rows[first + r], block_.k0, block_.count, out);
      if (bytes < pitch) std::memset(out + bytes, 0, static_cast<std::size_t>(pitch - bytes));
    }
  }

  template <int kRowTiles>
  HWY_INLINE void RunTiles(int tile, const std::byte* const (&a)[2], std::int64_t pitch) {
    constexpr int kColumns = 16 * 4 / kRowTiles;
    const std::int64_t fold_bytes = std::int64_t{block_.products} * tile_bytes_;
    for (int column = 0; column < kPanelColumns; column += kColumns) {
      const std::byte* w = block_.units + 4 * column;
      for (int f = 0; f < block_.folds; ++f, w += fold_bytes / 4 * kUnitBytes) {
        const std::byte* const at[2] = {a[0] + f * fold_bytes, a[kRowTiles - 1] + f * fold_bytes};
        Products<kRowTiles>(at, pitch, w);
        FoldPending();
        slot_ = 1 - slot_;
        Sum* sums = sums_ + slot_ * 4 * kTileFloats;
        Tiles::template Store<0>(sums, kTileBytes);
        Tiles::template Store<1>(sums + kTileFloats, kTileBytes);
        Tiles::template Store<2>(sums + 2 * kTileFloats, kTileBytes);
        Tiles::template Store<3>(sums + 3 * kTileFloats, kTileBytes);
        const std::int64_t steps = scaled_ ? fold_steps_ : block_.count;
        pending_ = {kRowTiles,
                    tile,
                    column,
                    block_.scales + f * kPanelColumns,
                    block_.group + f,
                    block_.k0 + f * steps,
                    static_cast<int>(steps / args_.fold)};
      }
    }
  }

  // Tile (i, j) of sums of kRowTiles x (4 / kRowTiles) is C = i * (4 / kRowTiles) + j.
  template <int kRowTiles>
  HWY_INLINE void Products(const std::byte* const (&a)[2], std::int64_t pitch, const std::byte* w) {
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
    const std::int64_t tile_units = tile_bytes_ / 4 * kUnitBytes;
    for (int s = 0; s < block_.products; ++s, w += tile_units) {
      OnTheWay();
      const std::int64_t at = s * std::int64_t{tile_bytes_};
      Tiles::template Load<4>(a[0] + at, pitch);
      Tiles::template Load<6>(w, kUnitBytes);
      Operand::template Dot<Tiles, 0, 4, 6>();
      Tiles::template Load<7>(w + 64, kUnitBytes);
      Operand::template Dot<Tiles, 1, 4, 7>();
      if constexpr (kRowTiles == 2) {
        Tiles::template Load<5>(a[1] + at, pitch);
        Operand::template Dot<Tiles, 2, 5, 6>();
        Operand::template Dot<Tiles, 3, 5, 7>();
      } else {
        Tiles::template Load<6>(w + 128, kUnitBytes);
        Operand::template Dot<Tiles, 2, 4, 6>();
        Tiles::template Load<7>(w + 192, kUnitBytes);
        Operand::template Dot<Tiles, 3, 4, 7>();
      }
    }
  }

  HWY_INLINE void OnTheWay() {
    if (Source::kDecodes) DecodeSome(units_per_turn_);
    if (fetch_ >= fetch_end_) return;
    for (int line = 0; line < fetch_lines_; ++line) __builtin_prefetch(fetch_ + 64 * line, 0, 2);
    fetch_ += 64 * std::int64_t{fetch_lines_};
  }

  HWY_INLINE void FoldPending() {
    if (pending_.row_tiles == 2) FoldTiles<2>();
    if (pending_.row_tiles == 1) FoldTiles<1>();
    pending_.row_tiles = 0;
  }
  template <int kRowTiles>
  HWY_NOINLINE void FoldTiles() {
    const GroupFold fold(args_, pending_.group);
    if (fold.plain()) {
      FoldRows<kRowTiles, true>(fold);
    } else {
      FoldRows<kRowTiles, false>(fold);
    }
  }
  template <int kRowTiles, bool kPlain>
  HWY_INLINE void FoldRows(const GroupFold& fold) {
    constexpr int kVectors = 4 / kRowTiles;
    VF scale[kVectors];
    for (int v = 0; v < kVectors; ++v)
      scale[v] = hn::LoadU(df, pending_.scales + pending_.column + 16 * v);
    for (int i = 0; i < kRowTiles; ++i) {
      const int tile = pending_.tile + i, first = cut_.first(tile);
      for (int r = cut_.shared(tile); r < cut_.height; ++r) {
        const int row = first + r;
        const Sum* sums = sums_ + (slot_ * 4 + i * kVectors) * kTileFloats + r * 16;
        float* result = args_.result + row * kPanelColumns + pending_.column;
        const std::int32_t start =
            Operand::Start(args_, args_.rows[row], pending_.k0, pending_.starts);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const VF sum = Operand::ToFloat(sums + v * kTileFloats, start);
          const VF total = hn::Load(df, result + 16 * v);
          hn::Store(fold.template Into<kPlain>(total, sum, scale[v], row, pending_.column + 16 * v),
                    df, result + 16 * v);
        }
      }
    }
  }

  static constexpr std::int64_t kUnitsBytes = kBlockBytes / 4 * kUnitBytes;
  alignas(64) std::byte decoded_[2 * kUnitsBytes];
  alignas(64) std::byte rows_[2 * kTileRows * kBlockBytes];
  alignas(64) Sum sums_[2 * 4 * kTileFloats];
  alignas(64) float scales_[2 * kGroup / kFinest * kPanelColumns];
  const PanelArgs& args_;
  Source source_;
  TileCut cut_;
  bool scaled_;
  int fold_steps_, block_steps_, tile_bytes_;
  std::int64_t pitch_;
  Units units_;
  Block block_;
  Pending pending_;
  int slot_ = 0;
  const std::byte* fetch_ = nullptr;
  const std::byte* fetch_end_ = nullptr;
  int fetch_lines_ = 0, units_per_turn_ = 0;
};

template <class Tiles, class Source>
HWY_NOINLINE void RunTileGemm(const PanelArgs& args, bool scaled) {
  TileGemm<Tiles, Source> gemm(args, scaled);
  if (gemm.Run()) return;
  if constexpr (!std::is_same_v<Source, typename Source::AnyScale>)
    RunTileGemm<Tiles, typename Source::AnyScale>(args, scaled);
}

template <class Tiles, class Source>
void PlainGemmTiles(const PanelArgs& args) {
  RunTileGemm<Tiles, StripScaled<Source>>(
      args, args.panel_scales != nullptr || args.row_scales != nullptr);
}

HWY_INLINE bool FoldsGroups(const PanelArgs& args) {
  return args.group_scale_format != ScaleFormat::kNone || args.row_scales != nullptr ||
         args.group_offsets != nullptr;
}
template <class Tiles, class Source>
void GroupedGemmTiles(const PanelArgs& args) {
  RunTileGemm<Tiles, Source>(args, Source::kHoldsGroup || FoldsGroups(args));
}

// Rows from which on the tiles win over the 8-bit dot product, and groups from which on they do.
constexpr int kMinTileRowsI8 = 8, kMinTileFoldI8 = kTileBytes;

template <class Tiles, class Source, WeightKind kKind>
void GroupedGemmTilesI8(const PanelArgs& args) {
  const bool scaled = FoldsGroups(args);
  if (args.fold < kMinTileFoldI8 || (scaled && args.num_rows < kMinTileRowsI8))
    return kernels_avx512_bf16()->grouped_gemm_i8[kKind](args);
  RunTileGemm<Tiles, Source>(args, scaled);
}

// The kernels that `Tiles` replaces in the table of the AVX-512 tier.
template <class Tiles>
void UseTiles(CpuKernels& t) {
  using enum WeightKind;
  using BF16 = UnitsInPlace<TileBF16>;
  using I8 = UnitsInPlace<TileI8<0>>;
  t.chunk_rows = 16384;
  t.panel_gemm_bf16[kBF16] = PlainGemmTiles<Tiles, BF16>;
  t.panel_gemm_bf16[kE4M3] = PlainGemmTiles<Tiles, DecodedUnits<PairsE4M3>>;
  t.grouped_gemm_bf16[kE4M3] = GroupedGemmTiles<Tiles, DecodedUnits<PairsE4M3>>;
  t.grouped_gemm_bf16[kCode4] = GroupedGemmTiles<Tiles, DecodedUnits<PairsCode4>>;
  t.grouped_gemm_bf16[kI8] = GroupedGemmTiles<Tiles, DecodedUnits<PairsI8>>;
  t.grouped_gemm_bf16[kInt4Fp8] = GroupedGemmTiles<Tiles, DecodedUnits<PairsInt4Fp8>>;
  t.grouped_gemm_i8[kI8Quads] = GroupedGemmTilesI8<Tiles, I8, kI8Quads>;
  t.grouped_gemm_i8[kI4Quads] = GroupedGemmTilesI8<Tiles, DecodedQuads4, kI4Quads>;
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
