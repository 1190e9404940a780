// A tile of the integer panel GEMM (panel_gemm_i8-inl.h): up to six rows meet some groups of a
// panel, and the groups' sums are folded into the result.
#if defined(MOESAIC_CPU_PANEL_TILE_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_TILE_I8_INL_H_
#undef MOESAIC_CPU_PANEL_TILE_I8_INL_H_
#else
#define MOESAIC_CPU_PANEL_TILE_I8_INL_H_
#endif

#include <cstring>

#include "cpu/group_sums_i8-inl.h"
#include "cpu/super_scales-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// A block has 128 steps, groups at least 16. That of few rows, which read units as they lie, has
// four groups or more.
inline constexpr int kMaxI8Groups = kGroup / kFinestI8Group;
inline constexpr int kFewI8Rows = kSuperGemmRows;
// Ahead of what few rows read where scales are a stream of their own.
constexpr std::int64_t kSuperPrefetchBytes = 8192;

// Some groups and the rows that meet them.
struct I8Block {
  const std::byte* units = nullptr;
  const float* scales = nullptr;  // of the first group
  std::int64_t scale_step = 0;    // to those of the next one
  std::int64_t group = 0;         // first one
  int groups = 0;
  std::int64_t row_scale[kMaxI8Groups] = {};  // of each group: which of a row's scales is its; or 0
  int row = 0;
  const std::byte* fetch = nullptr;  // what to ask of memory on the way
  // Of I8ScalesSuper: the super-block and the first group's number in it.
  const std::byte* super = nullptr;
  int super_group = 0;
};

// The blocks of a panel, one after the other. (No function that takes a lambda: clang compiles lambdas
// without the dot product.)
class I8Blocks {
 public:
  HWY_INLINE explicit I8Blocks(const PanelArgs& args)
      : groups_(args.padded_k / args.fold),
        most_(HWY_MAX(kGroup / args.fold, args.num_rows <= kFewI8Rows ? kFewI8Groups : 1)) {}

  // The next block, where its units and scales are still to come. False: there is none.
  HWY_INLINE bool Next(const PanelArgs& args) {
    block.group += block.groups;
    if (block.group >= groups_) return false;
    block.groups = static_cast<int>(HWY_MIN(std::int64_t{most_}, groups_ - block.group));
    for (int g = 0; args.row_scales != nullptr && g < block.groups; ++g) {
      block.row_scale[g] = row_scale_;
      if (++folds_of_scale_ == args.folds_per_row_scale) folds_of_scale_ = 0, ++row_scale_;
    }
    block.row = 0;
    return true;
  }

  I8Block block;

 private:
  std::int64_t groups_;
  int most_;
  std::int64_t row_scale_ = 0;
  int folds_of_scale_ = 0;
};

// --- Scales and offsets of a block's groups for a tile's columns

struct I8ScalesF32 {
  template <int kVectors>
  struct Of {
    const float* scales;
    const float* offsets;
    std::int64_t step;

    HWY_INLINE Of(const PanelArgs& args, const I8Block& block, int column)
        : scales(block.scales + column),
          offsets(args.group_offsets == nullptr
                      ? nullptr
                      : args.group_offsets + block.group * kPanelColumns + column),
          step(block.scale_step) {}
    HWY_INLINE bool has_offsets() const { return offsets != nullptr; }
    HWY_INLINE VF Scale(int g, int v) const {
      return hn::LoadU(df, scales + g * step + v * kLanes);
    }
    HWY_INLINE VF Offset(int g, int v, VF) const {
      return hn::LoadU(df, offsets + g * kPanelColumns + v * kLanes);
    }
  };
};

// Compact ones of super-blocks: the same numbers, made where they are used.
template <int kBits, bool kMinima>
struct I8ScalesSuper {
  using Columns = SuperScaleColumns<kBits>;
  template <int kVectors>
  struct Of {
    Columns scales[kVectors], minima[kVectors];
    VF bias;

    HWY_INLINE Of(const PanelArgs& args, const I8Block& block, int column)
        : bias(hn::Set(df, -args.super_bias)) {
      constexpr std::int64_t kUnits = 2 * kPanelColumns;
      const std::byte* at = block.super;
      const int group = MOESAIC_FAULT(cpu_super_gemm_repeats_first_half) ? 0 : block.super_group;
      const std::byte* planes = at + kUnits * (kMinima ? 2 : 1) + group * kBits / 8 * kPanelColumns;
      const std::byte* planes_of_minima = planes + args.super.planes() * kPanelColumns;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int c = column + v * kLanes;
        scales[v] = {planes + c, Columns::Unit(at + 2 * c)};
        if constexpr (kMinima)
          minima[v] = {planes_of_minima + c, Columns::Unit(at + kUnits + 2 * c)};
      }
    }
    static HWY_INLINE bool has_offsets() { return kMinima; }
    HWY_INLINE VF Scale(int g, int v) const { return scales[v].One(g); }
    HWY_INLINE VF Offset(int g, int v, VF scale) const {
      return hn::MulAdd(scale, bias, minima[v].One(g));
    }
  };
};

// What the groups of a block are multiplied by for MR rows, and where their sums go: as
// FoldColumns does, but looked up once per block.
template <class Scales, int MR>
class I8Fold {
 public:
  static constexpr int kVectors = kVectorsOfRows<MR>;

  HWY_INLINE I8Fold(const PanelArgs& args, const I8Block& block, int column)
      : scales_(args, block, column),
        row_scale_(block.row_scale),
        result_(args.result + block.row * kPanelColumns + column) {
    for (int r = 0; r < MR; ++r) {
      const int row = block.row + r;
      row_scales_[r] = args.row_scales == nullptr ? &kOne : args.row_scales[row];
      sums_[r] = scales_.has_offsets() ? args.row_sums[row] + block.group : nullptr;
    }
  }

  // Few rows keep their results in registers from group to group.
  static constexpr bool kKeeps = MR <= 2;

  HWY_INLINE void Load(VF (&total)[MR][kVectors]) const {
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) total[r][v] = hn::Load(df, At(r, v));
    }
  }
  HWY_INLINE void Store(const VF (&total)[MR][kVectors]) const {
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) hn::Store(total[r][v], df, At(r, v));
    }
  }
  // Adds group g's sums to total, or to the results in memory.
  HWY_INLINE void Add(int g, const VF (&sums)[MR][kVectors], VF (&total)[MR][kVectors]) const {
    const std::int64_t row_scale = row_scale_[g];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const VF scale = scales_.Scale(g, v);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        if constexpr (!kKeeps) total[r][v] = hn::Load(df, At(r, v));
        total[r][v] = hn::MulAdd(sums[r][v], hn::Mul(scale, hn::Set(df, row_scales_[r][row_scale])),
                                 total[r][v]);
      }
      if (scales_.has_offsets()) {
        const VF offset = scales_.Offset(g, v, scale);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r)
          total[r][v] = hn::NegMulAdd(offset, hn::Set(df, sums_[r][g]), total[r][v]);
      }
      if constexpr (!kKeeps) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) hn::Store(total[r][v], df, At(r, v));
      }
    }
  }

 private:
  HWY_INLINE float* At(int r, int v) const { return result_ + r * kPanelColumns + v * kLanes; }

  static constexpr float kOne = 1;

  typename Scales::template Of<kVectors> scales_;
  const std::int64_t* row_scale_;
  float* result_;
  const float* row_scales_[MR];
  const float* sums_[MR];
};

// A block's groups for MR rows. kLines: of memory to ask for with each unit.
template <class Unit, class Scales, int MR, int kLines>
HWY_NOINLINE void RunI8Tile(const PanelArgs& args, const I8Block& block) {
  using Fold = I8Fold<Scales, MR>;
  constexpr int kVectors = Fold::kVectors;
  constexpr int kStart = kI8StartBytes;
  const int fold_steps = args.fold, groups = block.groups;
  const std::int64_t group_bytes = kStart + fold_steps;
  const std::uint8_t* first[MR];
  for (int r = 0; r < MR; ++r) {
    first[r] = static_cast<const std::uint8_t*>(args.rows[block.row + r]) +
               block.group * group_bytes + kStart;
  }
  const I8TileRowsOf<Unit, MR> rows(first, groups, fold_steps);
  for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    const Fold fold(args, block, column);
    const std::uint8_t* a[MR];
    for (int r = 0; r < MR; ++r) a[r] = first[r];
    const std::byte* unit = block.units + 4 * column;
    const std::byte* fetch = block.fetch;
    VF total[MR][kVectors];
    if constexpr (Fold::kKeeps) fold.Load(total);
    for (int g = 0; g < groups; ++g) {
      VI acc[MR][kVectors];
      SumGroup<Unit, MR, kLines>(unit, rows, g, a, fold_steps, column == 0, fetch, acc);
      VF sums[MR][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::ConvertTo(df, acc[r][v]);
        if constexpr (Unit::kDoubled) {
          const float half = MOESAIC_FAULT(cpu_e2m1_sums_stay_doubled) ? 1.0F : 0.5F;
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Mul(sums[r][v], hn::Set(df, half));
        }
        a[r] += group_bytes;
      }
      fold.Add(g, sums, total);
    }
    if constexpr (Fold::kKeeps) fold.Store(total);
  }
}

using I8TileFn = void (*)(const PanelArgs&, const I8Block&);
template <class Unit, int kLines, class Scales = I8ScalesF32>
constexpr I8TileFn kI8Tiles[7] = {nullptr,
                                  RunI8Tile<Unit, Scales, 1, kLines>,
                                  RunI8Tile<Unit, Scales, 2, kLines>,
                                  RunI8Tile<Unit, Scales, 3, kLines>,
                                  RunI8Tile<Unit, Scales, 4, kLines>,
                                  RunI8Tile<Unit, Scales, 5, kLines>,
                                  RunI8Tile<Unit, Scales, 6, kLines>};

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_DOT8

#endif  // per-target include guard
