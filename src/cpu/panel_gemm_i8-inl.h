// The grouped panel GEMM for rows of int8 codes, on the 8-bit integer dot product (AVX-VNNI,
// AVX512_VNNI, I8MM): four steps of k per lane and instruction. A group's sum is an exact integer below
// 2^24, as it is an exact number in the fp32 and bf16 kernels, and the fold is theirs: the bits are
// those of panel_gemm_grouped-inl.h.
//
// The instruction wants one side unsigned: weights lie with kDotBias (or kDotBias4) added, and every
// group's sum starts at minus that times the sum of the row's codes; the row holds what kDotBias
// makes it (StoreI8).
#if defined(MOESAIC_CPU_PANEL_GEMM_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_I8_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_I8_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_I8_INL_H_
#endif

#include <cstring>
#include <utility>

#include "cpu/panel_gemm_grouped-inl.h"
#include "cpu/super_scales-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

using VI = hn::Vec<decltype(di32)>;

// acc += products of four unsigned bytes of w and four signed ones of x, per lane. (Highway 1.0 has
// no such operation, and with the intrinsic g++ 12 spills half of the accumulators.)
HWY_INLINE void AddQuads(VI& acc, VI w, VI x) {
#if HWY_TARGET == HWY_AVX2
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.raw) : "x"(w.raw), "x"(x.raw));
#elif HWY_ARCH_ARM_A64
  __asm__("usdot %0.4s, %1.16b, %2.16b" : "+w"(acc.raw) : "w"(w.raw), "w"(x.raw));
#else
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.raw) : "v"(w.raw), "v"(x.raw));
#endif
}

// A row of values of int8 codes (n a multiple of fold) to the groups that the GEMM below reads.
void StoreI8(const float* row, std::int64_t n, int fold, void* dst) {
  const hn::Rebind<std::int8_t, DF> di8;
  const int bias = MOESAIC_FAULT(cpu_i8_bias_kept) ? 0 : kDotBias;
  auto* out = static_cast<std::int8_t*>(dst);
  for (std::int64_t k = 0; k < n; k += fold, out += fold) {
    std::int8_t* codes = out + sizeof(std::int32_t);
    VI sum = hn::Zero(di32);
    for (int i = 0; i < fold; i += kLanes) {
      const VI v = hn::ConvertTo(di32, hn::LoadU(df, row + k + i));
      sum = hn::Add(sum, v);
      hn::StoreU(hn::DemoteTo(di8, v), di8, codes + i);
    }
    const std::int32_t start = -bias * hn::GetLane(hn::SumOfLanes(di32, sum));
    std::memcpy(out, &start, sizeof(start));
    out = codes;
  }
}

HWY_INLINE VI LoadLanes(const std::byte* unit, int v) {
  return hn::Load(di32, reinterpret_cast<const std::int32_t*>(unit) + v * kLanes);
}

// --- Units of weights: what a format contributes. Raw: vector v of a unit's columns as it lies;
// Quad<Q>: steps 4 Q to 4 Q + 3 of it.

template <int kPlanes>
struct RawQuads {
  VI plane[kPlanes];

  RawQuads(const std::byte* unit, int v) {
#pragma GCC unroll 3
    for (int i = 0; i < kPlanes; ++i) plane[i] = LoadLanes(unit + i * kUnitBytes, v);
  }
};

struct UnitQuads8 {
  static constexpr int kSteps = 4;
  static constexpr std::int64_t kBytes = kUnitBytes;
  using Raw = RawQuads<1>;
  static constexpr int kStartShift = 0;    // from the row's start to that of this format's bias
  static constexpr bool kDoubled = false;  // sums are twice what they should be
  using Decoded = UnitQuads8;
  template <int Q>
  static HWY_INLINE VI Quad(const Raw& raw) {
    return raw.plane[0];
  }
};

// Quads of 4-bit codes that have a byte each by now.
struct UnitQuads4InBytes : UnitQuads8 {
  static constexpr int kStartShift = 4;
};
static_assert(kDotBias4 << UnitQuads4InBytes::kStartShift == kDotBias);

struct UnitQuads4 {
  static constexpr int kSteps = 8;
  static constexpr std::int64_t kBytes = kUnitBytes;
  using Raw = RawQuads<1>;
  static constexpr int kStartShift = UnitQuads4InBytes::kStartShift;
  static constexpr bool kDoubled = false;
  using Decoded = UnitQuads4InBytes;
  template <int Q>
  static HWY_INLINE VI Quad(const Raw& raw) {
    const VI codes = raw.plane[0];
    return hn::And(Q == 0 ? codes : hn::ShiftRight<4>(codes), hn::Set(di32, 0x0F0F0F0F));
  }
};

// Twice the values of e2m1, and 16.
struct UnitQuadsE2M1InBytes : UnitQuads8 {
  static constexpr int kStartShift = 3;
  static constexpr bool kDoubled = true;
};
static_assert(kE2M1Bias << UnitQuadsE2M1InBytes::kStartShift == kDotBias);

// Codes that lie as those of UnitQuads4.
struct UnitQuadsE2M1 : UnitQuads4 {
  static constexpr int kStartShift = UnitQuadsE2M1InBytes::kStartShift;
  static constexpr bool kDoubled = true;
  using Decoded = UnitQuadsE2M1InBytes;
  template <int Q>
  static HWY_INLINE VI Quad(const Raw& raw) {
    const hn::Repartition<std::uint8_t, decltype(di32)> du8;
    alignas(16) static constexpr std::uint8_t kTable[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                            16, 15, 14, 13, 12, 10, 8,  4};
    return hn::BitCast(di32, hn::TableLookupBytes(hn::LoadDup128(du8, kTable),
                                                  hn::BitCast(du8, UnitQuads4::Quad<Q>(raw))));
  }
};

struct UnitQuads6InBytes : UnitQuads8 {
  static constexpr int kStartShift = 2;
};
static_assert(kDotBias6 << UnitQuads6InBytes::kStartShift == kDotBias);

// Three quads in three planes, and two bits of the fourth above each of them.
struct UnitQuads6 {
  static constexpr int kSteps = 16;
  static constexpr std::int64_t kBytes = 3 * kUnitBytes;
  using Raw = RawQuads<3>;
  static constexpr int kStartShift = UnitQuads6InBytes::kStartShift;
  static constexpr bool kDoubled = false;
  using Decoded = UnitQuads6InBytes;
  template <int Q>
  static HWY_INLINE VI Quad(const Raw& raw) {
    if constexpr (Q < 3) {
      return hn::And(raw.plane[Q], hn::Set(di32, 0x3F3F3F3F));
    } else {
      const VI low = hn::ShiftRight<6>(raw.plane[0]);
      const VI middle = hn::ShiftRight<4>(raw.plane[1]);
      const VI high = hn::ShiftRight<2>(raw.plane[2]);
      return hn::Or(hn::And(low, hn::Set(di32, 0x03030303)),
                    hn::Or(hn::And(middle, hn::Set(di32, 0x0C0C0C0C)),
                           hn::And(high, hn::Set(di32, 0x30303030))));
    }
  }
};

// Calls use.template Do<Q> for every quad of a unit, in order.
template <class Unit, int Q = 0, class Use>
HWY_INLINE void ForQuads(const Use& use) {
  use.template Do<Q>();
  if constexpr (4 * (Q + 1) < Unit::kSteps) ForQuads<Unit, Q + 1>(use);
}

// `bytes` of units, one quad of steps after the other.
template <class Unit>
struct StoreQuads {
  const std::byte* w;
  std::byte* out;
  template <int Q>
  HWY_INLINE void Do() const {
    for (int v = 0; v < kPanelColumns / kLanes; ++v) {
      hn::Store(Unit::template Quad<Q>(typename Unit::Raw(w, v)), di32,
                reinterpret_cast<std::int32_t*>(out + Q * kUnitBytes) + v * kLanes);
    }
  }
};
template <class Unit>
void DecodeQuads(const std::byte* w, std::int64_t bytes, std::byte* out) {
  for (std::int64_t at = 0; at < bytes; at += Unit::kBytes) {
    ForQuads<Unit>(StoreQuads<Unit>{w + at, out});
    out += Unit::kSteps / 4 * kUnitBytes;
  }
}

// --- Tiles

// A block has 128 steps, groups at least 16. That of few rows, which read units as they lie, has
// four groups or more.
inline constexpr int kFinestI8Group = 16, kMaxI8Groups = kGroup / kFinestI8Group;
inline constexpr int kFewI8Rows = kSuperGemmRows, kFewI8Groups = 4;
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
  const float* scales;
  const float* offsets;
  std::int64_t step;

  HWY_INLINE I8ScalesF32(const PanelArgs& args, const I8Block& block, int column)
      : scales(block.scales + column),
        offsets(args.group_offsets == nullptr
                    ? nullptr
                    : args.group_offsets + block.group * kPanelColumns + column),
        step(block.scale_step) {}
  HWY_INLINE bool has_offsets() const { return offsets != nullptr; }
  HWY_INLINE VF Scale(int g, int v) const { return hn::LoadU(df, scales + g * step + v * kLanes); }
  HWY_INLINE VF Offset(int g, int v, VF) const {
    return hn::LoadU(df, offsets + g * kPanelColumns + v * kLanes);
  }
};

// Compact ones of super-blocks: the same numbers, made where they are used.
template <int kBits, bool kMinima>
struct I8ScalesSuper {
  using Columns = SuperScaleColumns<kBits>;
  Columns scales[kTileVectors], minima[kTileVectors];
  VF bias;

  HWY_INLINE I8ScalesSuper(const PanelArgs& args, const I8Block& block, int column)
      : bias(hn::Set(df, -args.super_bias)) {
    constexpr std::int64_t kUnits = 2 * kPanelColumns;
    const std::byte* at = block.super;
    const int group = MOESAIC_FAULT(cpu_super_gemm_repeats_first_half) ? 0 : block.super_group;
    const std::byte* planes = at + kUnits * (kMinima ? 2 : 1) + group * kBits / 8 * kPanelColumns;
    const std::byte* planes_of_minima = planes + args.super.planes() * kPanelColumns;
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) {
      const int c = column + v * kLanes;
      scales[v] = {planes + c, Columns::Unit(at + 2 * c)};
      if constexpr (kMinima) minima[v] = {planes_of_minima + c, Columns::Unit(at + kUnits + 2 * c)};
    }
  }
  static HWY_INLINE bool has_offsets() { return kMinima; }
  HWY_INLINE VF Scale(int g, int v) const { return scales[v].One(g); }
  HWY_INLINE VF Offset(int g, int v, VF scale) const {
    return hn::MulAdd(scale, bias, minima[v].One(g));
  }
};

// Quad Q of a unit, kTileVectors vectors of columns, for MR rows. Weights are read again for every
// quad: in registers they would push accumulators out.
template <class Unit, int Q, int MR>
HWY_INLINE void StepI8(const std::byte* unit, const std::uint8_t* const (&a)[MR], int at,
                       VI (&acc)[MR][kTileVectors]) {
  if constexpr (Unit::kSteps > 4) __asm__("" : "+r"(unit));
  VI w[kTileVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kTileVectors; ++v) w[v] = Unit::template Quad<Q>(typename Unit::Raw(unit, v));
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    std::int32_t quad;
    std::memcpy(&quad, a[r] + at + 4 * Q, sizeof(quad));
    const VI x = hn::Set(di32, quad);
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) AddQuads(acc[r][v], w[v], x);
  }
}

// All quads of a unit.
template <class Unit, int MR>
struct UnitStepI8 {
  const std::byte* unit;
  const std::uint8_t* const (&a)[MR];
  int at;
  VI (&acc)[MR][kTileVectors];
  template <int Q>
  HWY_INLINE void Do() const {
    StepI8<Unit, Q, MR>(unit, a, at, acc);
  }
};

// All quads of one vector of a unit's columns for one row whose codes are x: weights are read once.
template <class Unit, std::size_t... Q>
HWY_INLINE VI VectorOfRowI8(const typename Unit::Raw& raw, const VI (&x)[sizeof...(Q)], VI acc,
                            std::index_sequence<Q...>) {
  (AddQuads(acc, Unit::template Quad<Q>(raw), x[Q]), ...);
  return acc;
}

template <class Unit>
HWY_INLINE void UnitOfRowI8(const std::byte* unit, const std::uint8_t* a, VI (&acc)[kTileVectors]) {
  constexpr int kQuads = Unit::kSteps / 4;
  VI x[kQuads];
#pragma GCC unroll 4
  for (int q = 0; q < kQuads; ++q) {
    std::int32_t quad;
    std::memcpy(&quad, a + 4 * q, sizeof(quad));
    x[q] = hn::Set(di32, quad);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kTileVectors; ++v) {
    acc[v] = VectorOfRowI8<Unit>(typename Unit::Raw(unit, v), x, acc[v],
                                 std::make_index_sequence<kQuads>{});
  }
}

// What the groups of a block are multiplied by for MR rows, and where their sums go: as
// FoldColumns does, but looked up once per block.
template <class Scales, int MR>
class I8Fold {
 public:
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

  HWY_INLINE void Load(VF (&total)[MR][kTileVectors]) const {
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kTileVectors; ++v) total[r][v] = hn::Load(df, At(r, v));
    }
  }
  HWY_INLINE void Store(const VF (&total)[MR][kTileVectors]) const {
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kTileVectors; ++v) hn::Store(total[r][v], df, At(r, v));
    }
  }
  // Adds group g's sums to total, or to the results in memory.
  HWY_INLINE void Add(int g, const VF (&sums)[MR][kTileVectors],
                      VF (&total)[MR][kTileVectors]) const {
    const std::int64_t row_scale = row_scale_[g];
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) {
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

  Scales scales_;
  const std::int64_t* row_scale_;
  float* result_;
  const float* row_scales_[MR];
  const float* sums_[MR];
};

// A block's groups for MR rows. kLines: of memory to ask for with each unit.
template <class Unit, class Scales, int MR, int kLines>
HWY_NOINLINE void RunI8Tile(const PanelArgs& args, const I8Block& block) {
  using Fold = I8Fold<Scales, MR>;
  constexpr int kStart = sizeof(std::int32_t);
  const int fold_steps = args.fold, groups = block.groups;
  const std::int64_t group_bytes = kStart + fold_steps;
  for (int column = 0; column < kPanelColumns; column += kTileVectors * kLanes) {
    const Fold fold(args, block, column);
    const std::uint8_t* a[MR];
    for (int r = 0; r < MR; ++r) {
      a[r] = static_cast<const std::uint8_t*>(args.rows[block.row + r]) +
             block.group * group_bytes + kStart;
    }
    const std::byte* unit = block.units + 4 * column;
    const std::byte* fetch = block.fetch;
    VF total[MR][kTileVectors];
    if constexpr (Fold::kKeeps) fold.Load(total);
    for (int g = 0; g < groups; ++g) {
      VI acc[MR][kTileVectors];
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        std::int32_t start;
        std::memcpy(&start, a[r] - kStart, sizeof(start));
#pragma GCC unroll 8
        for (int v = 0; v < kTileVectors; ++v)
          acc[r][v] = hn::Set(di32, start >> Unit::kStartShift);
      }
      for (int k = 0; k < fold_steps; k += Unit::kSteps, unit += Unit::kBytes) {
        if (kLines > 0 && column == 0) {
#pragma GCC unroll 12
          for (int line = 0; line < kLines; ++line) __builtin_prefetch(fetch + 64 * line, 0, 2);
          fetch += 64 * kLines;
        }
        if constexpr (MR == 1) {
          UnitOfRowI8<Unit>(unit, a[0] + k, acc[0]);
        } else {
          ForQuads<Unit>(UnitStepI8<Unit, MR>{unit, a, k, acc});
        }
      }
      VF sums[MR][kTileVectors];
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] = hn::ConvertTo(df, acc[r][v]);
        if constexpr (Unit::kDoubled) {
          const float half = MOESAIC_FAULT(cpu_e2m1_sums_stay_doubled) ? 1.0F : 0.5F;
#pragma GCC unroll 8
          for (int v = 0; v < kTileVectors; ++v)
            sums[r][v] = hn::Mul(sums[r][v], hn::Set(df, half));
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

// All tiles of a block of `units` units that is in the cache; the first ones ask for the next
// `bytes` of weights, which their first tile would wait for.
template <class Unit>
HWY_INLINE void RunI8Tiles(const PanelArgs& args, std::int64_t units, std::int64_t bytes,
                           I8Block& block) {
  const int tiles = (args.num_rows + 5) / 6;
  const int each = tiles * units * 64 < bytes ? 2 : 1;  // lines per unit
  const std::byte* end = block.fetch + bytes;
  for (int i = 0; i < tiles; ++i) {
    const int height = args.num_rows / tiles + (i < args.num_rows % tiles ? 1 : 0);
    if (block.fetch >= end) {
      kI8Tiles<Unit, 0>[height](args, block);
    } else {
      (each == 2 ? kI8Tiles<Unit, 2> : kI8Tiles<Unit, 1>)[height](args, block);
      block.fetch += 64 * each * units;
    }
    block.row += height;
  }
}

// 128 steps at a time: 8 KiB of L1. Up to six rows read the units as they lie; more read quads,
// which codes of fewer than 8 bits are decoded to before.
template <class Unit>
void GroupedGemmI8(const PanelArgs& args) {
  using Decoded = typename Unit::Decoded;
  constexpr bool kDecodes = Unit::kSteps != Decoded::kSteps;
  ClearResult(args);
  HWY_ALIGN float scales[kMaxI8Groups * kPanelColumns];
  HWY_ALIGN std::byte quads[kDecodes ? kGroup * kPanelColumns : 64];
  const bool scaled = args.group_scale_format != ScaleFormat::kNone;
  if (!scaled) ExpandScales(args, 0, scales);
  const std::byte* w = args.panel;
  I8Blocks blocks(args);
  while (blocks.Next(args)) {
    I8Block& block = blocks.block;
    const std::int64_t steps = std::int64_t{block.groups} * args.fold;
    const std::int64_t bytes = steps / Unit::kSteps * Unit::kBytes;
    PrefetchGroups(args, block.group + block.groups, block.groups);
    block.scales = scales;
    block.scale_step = scaled ? kPanelColumns : 0;
    if (args.group_scale_format == ScaleFormat::kF32) {
      block.scales = ExpandScales(args, block.group, scales);
    } else if (scaled) {
      for (int g = 0; g < block.groups; ++g)
        ExpandScales(args, block.group + g, scales + g * kPanelColumns);
    }
    block.units = w;
    if (args.num_rows <= kFewI8Rows) {
      block.fetch = w + kPrefetchBytes;
      kI8Tiles<Unit, Unit::kBytes / 64>[args.num_rows](args, block);
    } else {
      if constexpr (kDecodes) {
        DecodeQuads<Unit>(w, bytes, quads);
        block.units = quads;
      }
      block.fetch = w + bytes;
      RunI8Tiles<Decoded>(args, steps / Decoded::kSteps, bytes, block);
    }
    w += bytes;
  }
}

// Up to kSuperGemmRows rows.
template <class Unit, class Scales>
void SuperGemmI8(const PanelArgs& args) {
  ClearResult(args);
  const std::byte* w = args.panel;
  const std::byte* super = args.super_blocks;
  const std::int64_t block_bytes = args.super.block_bytes();
  bool second = false;
  I8Blocks blocks(args);
  while (blocks.Next(args)) {
    I8Block& block = blocks.block;
    // Half of the scales of the next super-block.
    const std::byte* const ahead = super + block_bytes + (second ? block_bytes / 2 : 0);
    for (std::int64_t at = 0; at < block_bytes / 2; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    block.super = super;
    block.super_group = second ? kGroup / args.fold : 0;
    block.units = w;
    block.fetch = w + kSuperPrefetchBytes;
    kI8Tiles<Unit, Unit::kBytes / 64, Scales>[args.num_rows](args, block);
    w += std::int64_t{block.groups} * args.fold / Unit::kSteps * Unit::kBytes;
    if (second) super += block_bytes;
    second = !second;
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_DOT8

#endif  // per-target include guard
