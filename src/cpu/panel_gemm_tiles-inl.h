// Panel GEMMs on tile registers, for bf16 and int8 operands and every format of
// panel_sources_tiles-inl.h. `Tiles` are the instructions (tiles_amx-inl.h), or a model of them in
// tests.
//
// A block of weights (128 steps, or more where no scale wants a fold before) meets tiles of up to
// 16 rows, two by two with halves of the panel's columns, or a single one with all of them. What a
// tile product computes of a row does not depend on the others, so a row's bits depend on that row
// and the weights only. Every number of rows takes tiles, because other instructions add bf16
// products in another order, or their order on vector registers (panel_stream_tiles-inl.h).
#if defined(MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_TILES_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <type_traits>

#include "cpu/panel_stream_tiles-inl.h"
#include "cpu/tiers.h"
#include "cpu/tile_rows-inl.h"
#include "cpu/tile_units-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

template <class Tiles, class Source>
class TileGemm {
  using Operand = typename Source::Operand;
  static constexpr int kBlockBytes = Source::kBlockBytes;
  static constexpr int kFinest = 16;  // steps of a fold

 public:
  TileGemm(const PanelArgs& args, const TileSteps& steps)
      : args_(args),
        steps_(steps),
        units_(args),
        cut_(args.num_rows),
        tile_bytes_(steps.product * Operand::kStepBytes),
        pitch_(RowPitch(args)),
        fold_shift_(std::countr_zero(static_cast<unsigned>(args.fold))) {}

  // False: see Pairs::Begin.
  bool Run() {
    if (!steps_.chained) ClearResult(args_);
    Tiles::Configure(MakeTileConfig(cut_.height, tile_bytes_));
    bool ok = units_.Begin(args_, steps_, args_.panel, 0);
    for (std::int64_t k0 = 0; ok && k0 < args_.padded_k; k0 += steps_.block) {
      units_.Finish();
      SetBlock(k0);
      const std::byte* end = units_.end();
      ok = units_.Begin(args_, steps_, end, k0 + steps_.block);
      if (ok) RunBlock(end);
    }
    Tiles::Release();
    if (steps_.chained) FinishChains();
    return ok;
  }

 private:
  // What tiles of rows meet.
  struct Block {
    const std::byte* units = nullptr;
    const float* scales = nullptr;  // [folds][64]
    std::int64_t k0 = 0, count = 0, padded = 0;
    std::int64_t group = 0;  // the first fold's
    int folds = 1;
    int products = 1;  // per fold
  };

  // The finished units become the block from step k0 on.
  HWY_INLINE void SetBlock(std::int64_t k0) {
    block_.k0 = k0;
    block_.count = units_.count();
    block_.padded = units_.padded();
    block_.units = units_.block();
    block_.group = k0 / steps_.fold;
    block_.folds = static_cast<int>(ceil_div(block_.count, std::int64_t{steps_.fold}));
    block_.products = static_cast<int>(block_.padded / steps_.product) / block_.folds;
    block_.scales = scales_;
    if (!steps_.scaled) {
      for (int c = 0; c < kPanelColumns; c += kLanes) hn::Store(hn::Set(df, 1.0F), df, scales_ + c);
      return;
    }
    PrefetchGroups(args_, block_.group + block_.folds, block_.folds);
    const float* first = Source::Scales(args_, block_.group, scales_);
    if (first != scales_) {
      block_.scales = first;  // in the panel's own
      return;
    }
    const int step = MOESAIC_FAULT(cpu_tiles_scales_of_first_group) ? 0 : kPanelColumns;
    for (int f = 1; f < block_.folds; ++f)
      Source::Scales(args_, block_.group + f, scales_ + f * step);
  }

  // All tiles of rows over the block, whose units end in the panel at `end`. On the way the next one
  // is decoded, or asked of memory.
  HWY_INLINE void RunBlock(const std::byte* end) {
    const int pairs = cut_.count / 2;
    const int turns = (2 * pairs + cut_.count % 2) * block_.folds * block_.products;
    units_per_turn_ = ceil_div((units_.end() - end) / Source::kBytes, std::int64_t{turns});
    // Four times a turn, one full block ahead: also into the panel behind this one, which is the
    // thread's next as a rule.
    const std::int64_t units = block_.count / Source::kSteps;
    fetch_ = end - units * Source::kBytes + TileUnits<Source>::kBytes;
    fetch_lines_ = static_cast<int>(ceil_div(units, std::int64_t{turns}));
    for (int tile = 0; tile < cut_.count; tile += 2) {
      const bool pair = tile + 1 < cut_.count;
      const std::byte* a[2] = {};
      std::int64_t pitch = pitch_;
      gap_ = Operand::kGap;
      for (int i = 0; i < (pair ? 2 : 1); ++i) {
        if (pitch_ != 0 && block_.count == block_.padded) {
          a[i] = static_cast<const std::byte*>(args_.rows[cut_.first(tile + i)]) +
                 Operand::Offset(args_, block_.k0);
        } else {
          gap_ = 0;
          pitch = block_.padded * Operand::kStepBytes;
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
    if (steps_.chained) return RunChains<kRowTiles>(tile, a, pitch);
    const std::int64_t fold_bytes = std::int64_t{block_.products} * tile_bytes_;
    for (int column = 0; column < kPanelColumns; column += kColumns) {
      const std::byte* w = block_.units + 4 * column;
      for (int f = 0; f < block_.folds; ++f, w += fold_bytes / 4 * kUnitBytes) {
        const std::byte* const at[2] = {a[0] + f * fold_bytes, a[kRowTiles - 1] + f * fold_bytes};
        ZeroSums();
        Products<kRowTiles>(at, pitch, w);
        Tiles::template Store<0>(sums_, kTileBytes);
        Tiles::template Store<1>(sums_ + kTileFloats, kTileBytes);
        Tiles::template Store<2>(sums_ + 2 * kTileFloats, kTileBytes);
        Tiles::template Store<3>(sums_ + 3 * kTileFloats, kTileBytes);
        FoldTiles<kRowTiles>(tile, column, f);
      }
    }
  }

  // A chained block: sums go on from the one before.
  template <int kRowTiles>
  HWY_INLINE void RunChains(int tile, const std::byte* const (&a)[2], std::int64_t pitch) {
    constexpr int kColumns = 16 * 4 / kRowTiles;
    constexpr std::int64_t kPitch = kPanelColumns * sizeof(float);
    for (int column = 0; column < kPanelColumns; column += kColumns) {
      float* const first = Chain(tile) + column;
      float* const second = kRowTiles == 2 ? Chain(tile + 1) + column : first + 32;
      if (block_.k0 == 0 || MOESAIC_FAULT(cpu_tiles_chain_starts_again)) {
        ZeroSums();
      } else {
        Tiles::template Load<0>(first, kPitch);
        Tiles::template Load<1>(first + 16, kPitch);
        Tiles::template Load<2>(second, kPitch);
        Tiles::template Load<3>(second + 16, kPitch);
      }
      Products<kRowTiles>(a, pitch, block_.units + 4 * column);
      Tiles::template Store<0>(first, kPitch);
      Tiles::template Store<1>(first + 16, kPitch);
      Tiles::template Store<2>(second, kPitch);
      Tiles::template Store<3>(second + 16, kPitch);
    }
  }
  // Where a tile's sums are, [height][kPanelColumns].
  HWY_INLINE float* Chain(int tile) {
    return cut_.shared(tile) > 0 ? last_ : args_.result + cut_.first(tile) * kPanelColumns;
  }
  HWY_INLINE void FinishChains() {
    const int tile = cut_.count - 1, shared = cut_.shared(tile);
    if (shared > 0) {
      std::memcpy(args_.result + (cut_.first(tile) + shared) * kPanelColumns,
                  last_ + shared * kPanelColumns,
                  static_cast<std::size_t>(cut_.height - shared) * kPanelColumns * sizeof(float));
    }
    if constexpr (!Operand::kFloatSums) {
      for (int r = 0; r < args_.num_rows; ++r) {
        const std::int32_t start = Operand::Start(args_, args_.rows[r], 0, args_.padded_k);
        float* result = args_.result + r * kPanelColumns;
        for (int c = 0; c < kPanelColumns; c += kLanes)
          hn::Store(Operand::ToFloat(hn::Load(df, result + c), start), df, result + c);
      }
    }
  }

  HWY_INLINE void ZeroSums() {
    Tiles::template Zero<0>();
    Tiles::template Zero<1>();
    Tiles::template Zero<2>();
    Tiles::template Zero<3>();
  }
  // Tile (i, j) of sums of kRowTiles x (4 / kRowTiles) is C = i * (4 / kRowTiles) + j.
  template <int kRowTiles>
  HWY_INLINE void Products(const std::byte* const (&a)[2], std::int64_t pitch, const std::byte* w) {
    const std::int64_t tile_units = tile_bytes_ / 4 * kUnitBytes;
    for (int s = 0; s < block_.products; ++s, w += tile_units) {
      if (Source::kDecodes) units_.Decode(units_per_turn_);
      std::int64_t at = s * std::int64_t{tile_bytes_};
      if constexpr (Operand::kGap > 0) at += (at >> fold_shift_) * gap_;
      Tiles::template Load<4>(a[0] + at, pitch);
      Tiles::template Load<6>(w, kUnitBytes);
      Operand::template Dot<Tiles, 0, 4, 6>();
      Fetch();
      Tiles::template Load<7>(w + 64, kUnitBytes);
      Operand::template Dot<Tiles, 1, 4, 7>();
      Fetch();
      if constexpr (kRowTiles == 2) {
        Tiles::template Load<5>(a[1] + at, pitch);
        Operand::template Dot<Tiles, 2, 5, 6>();
        Fetch();
        Operand::template Dot<Tiles, 3, 5, 7>();
      } else {
        Tiles::template Load<6>(w + 128, kUnitBytes);
        Operand::template Dot<Tiles, 2, 4, 6>();
        Fetch();
        Tiles::template Load<7>(w + 192, kUnitBytes);
        Operand::template Dot<Tiles, 3, 4, 7>();
      }
      Fetch();
    }
  }

  // Codes are asked for as they are decoded.
  HWY_INLINE void Fetch() {
    if (Source::kDecodes) return;
    for (int line = 0; line < fetch_lines_; ++line) __builtin_prefetch(fetch_ + 64 * line, 0, 2);
    fetch_ += 64 * std::int64_t{fetch_lines_};
  }

  template <int kRowTiles>
  HWY_NOINLINE void FoldTiles(int tile, int column, int f) {
    const GroupFold fold(args_, block_.group + f);
    if (fold.plain()) {
      FoldRows<kRowTiles, true>(fold, tile, column, f);
    } else {
      FoldRows<kRowTiles, false>(fold, tile, column, f);
    }
  }
  template <int kRowTiles, bool kPlain>
  HWY_INLINE void FoldRows(const GroupFold& fold, int first_tile, int column, int f) {
    constexpr int kVectors = 4 / kRowTiles;
    const std::int64_t count = std::min<std::int64_t>(steps_.fold, block_.count);
    VF scale[kVectors];
    for (int v = 0; v < kVectors; ++v)
      scale[v] = hn::LoadU(df, block_.scales + f * kPanelColumns + column + 16 * v);
    for (int i = 0; i < kRowTiles; ++i) {
      const int tile = first_tile + i, first = cut_.first(tile);
      for (int r = cut_.shared(tile); r < cut_.height; ++r) {
        const int row = first + r;
        const float* sums = sums_ + i * kVectors * kTileFloats + r * 16;
        float* result = args_.result + row * kPanelColumns + column;
        const std::int32_t start =
            Operand::Start(args_, args_.rows[row], block_.k0 + f * count, count);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const VF sum = Operand::ToFloat(hn::Load(df, sums + v * kTileFloats), start);
          const VF total = hn::Load(df, result + 16 * v);
          hn::Store(fold.template Into<kPlain>(total, sum, scale[v], row, column + 16 * v), df,
                    result + 16 * v);
        }
      }
    }
  }

  alignas(64) std::byte rows_[2 * kTileRows * kBlockBytes];
  alignas(64) float sums_[4 * kTileFloats];
  // Chained: the sums of a last tile that shares rows, each of which would go on twice in the result.
  alignas(64) float last_[kTileRows * kPanelColumns];
  alignas(64) float scales_[kGroup / kFinest * kPanelColumns];
  const PanelArgs& args_;
  const TileSteps steps_;
  TileUnits<Source> units_;
  const TileCut cut_;
  const int tile_bytes_;
  const std::int64_t pitch_;  // of rows where they lie
  const int fold_shift_;
  int gap_ = 0;  // between folds of the rows that are read
  Block block_;
  const std::byte* fetch_ = nullptr;
  int fetch_lines_ = 0;
  std::int64_t units_per_turn_ = 0;
};

template <class Tiles, class Source>
HWY_NOINLINE bool RunTiles(const PanelArgs& args, const TileSteps& steps) {
  return TileGemm<Tiles, Source>(args, steps).Run();
}

template <class Tiles, class Source>
void RunTileGemm(const PanelArgs& args, bool scaled) {
  const TileSteps steps = StepsOf<Source>(args, scaled);
  if (Streamed<Source>(args, steps) || RunTiles<Tiles, Source>(args, steps)) return;
  if constexpr (!std::is_same_v<Source, typename Source::AnyScale>)
    RunTileGemm<Tiles, typename Source::AnyScale>(args, scaled);
}

template <class Tiles, class Source>
void PlainGemmTiles(const PanelArgs& args) {
  RunTileGemm<Tiles, StripScaled<Source>>(
      args, args.panel_scales != nullptr || args.row_scales != nullptr);
}

HWY_INLINE bool FoldsGroups(const PanelArgs& args) {
  return args.group_scale_form != GroupScaleForm::kNone || args.row_scales != nullptr ||
         args.group_offsets != nullptr;
}
template <class Tiles, class Source>
void GroupedGemmTiles(const PanelArgs& args) {
  RunTileGemm<Tiles, Source>(args, Source::kHoldsGroup || FoldsGroups(args));
}

// Sums that are folded every 128 steps or more often are quicker on the 8-bit dot product, from and
// to whose registers they need not go through memory: tiles fold as long as they multiply.
template <class Tiles>
void GroupedGemmTilesI8(const PanelArgs& args) {
  if (args.fold < kTileBytes || FoldsGroups(args))
    return kernels_avx512_bf16()->grouped_gemm_i8[WeightKind::kI8Quads](args);
  RunTileGemm<Tiles, UnitsInPlace<TileI8>>(args, false);
}

// The kernels that `Tiles` replaces in the table of the AVX-512 tier.
template <class Tiles>
void UseTiles(CpuKernels& t) {
  using enum WeightKind;
  t.chunk_rows = 16384;
  t.rows_per_call = kMaxRows;
  t.reads_spaced_rows = true;
  t.super_scale_steps = 4096;  // a call configures tiles
  t.panel_gemm_bf16[kBF16] = PlainGemmTiles<Tiles, UnitsInPlace<TileBF16>>;
  t.panel_gemm_bf16[kE4M3] = PlainGemmTiles<Tiles, DecodedUnits<PairsE4M3>>;
  t.grouped_gemm_bf16[kE4M3] = GroupedGemmTiles<Tiles, DecodedUnits<PairsE4M3>>;
  t.grouped_gemm_bf16[kCode4] = GroupedGemmTiles<Tiles, DecodedUnits<PairsCode4>>;
  t.grouped_gemm_bf16[kI8] = GroupedGemmTiles<Tiles, DecodedUnits<PairsI8>>;
  t.grouped_gemm_bf16[kI6] = GroupedGemmTiles<Tiles, DecodedUnits<PairsI6>>;
  t.grouped_gemm_bf16[kInt4Fp8] = GroupedGemmTiles<Tiles, DecodedUnits<PairsInt4Fp8>>;
  t.grouped_gemm_i8[kI8Quads] = GroupedGemmTilesI8<Tiles>;
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
