// Panel GEMM for weights whose scales belong to one column and `fold` steps (16 to 128): one
// skeleton for all such formats, compiled once per tier. A format contributes "decode a unit to
// (exact) bf16 pairs"; a scale format contributes "the 64 factors of a group".
//
//   result += column_scale[g][c] * row_scale[r] * (sum over the group)
//             - offset[g][c] * row_sum[r][g]
//
// in this order everywhere, so that every regime gives the same bits.
#if defined(MOESAIC_CPU_PANEL_GEMM_GROUPED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_GROUPED_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_GROUPED_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_GROUPED_INL_H_
#endif

#include "cpu/panel_units-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// The group's 64 factors as fp32; may point into the panel's own scales.
HWY_INLINE const float* ExpandScales(const PanelArgs& args, std::int64_t group, float* buffer) {
  const hn::Rebind<std::uint8_t, DF> d8;
  const GroupScaleForm form = args.group_scale_form;
  const std::byte* first = args.group_scales;
  if (form != GroupScaleForm::kNone) first += group * kPanelColumns * bytes_of(form);
  if (form == GroupScaleForm::kF32) return reinterpret_cast<const float*>(first);
  const auto* halves = reinterpret_cast<const std::uint16_t*>(first);
  const auto codes = [&](int c) {  // where scales are bytes
    return hn::LoadU(d8, reinterpret_cast<const std::uint8_t*>(first) + c);
  };
  if (form == GroupScaleForm::kF16) {
    for (int c = 0; c < kPanelColumns; c += kLanes) hn::Store(LoadF16(halves + c), df, buffer + c);
  } else if (form == GroupScaleForm::kBF16) {
    for (int c = 0; c < kPanelColumns; c += kLanes) hn::Store(LoadBF16(halves + c), df, buffer + c);
  } else if (form == GroupScaleForm::kE8M0) {
    // An E8M0 code is an exponent field, but for 0, which is the subnormal 2^-127.
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const auto bits = hn::ShiftLeft<23>(hn::PromoteTo(du32, codes(c)));
      hn::Store(hn::BitCast(df, hn::Max(bits, hn::Set(du32, 0x00400000U))), df, buffer + c);
    }
  } else if (form == GroupScaleForm::kE4M3) {
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const auto code = hn::PromoteTo(du32, codes(c));
      hn::Store(DecodeE4M3::Widen(hn::ShiftLeft<24>(code)), df, buffer + c);
    }
  } else {
    for (int c = 0; c < kPanelColumns; c += kLanes) hn::Store(hn::Set(df, 1.0F), df, buffer + c);
  }
  return buffer;
}

// Asks for the scales and offsets of `count` groups.
HWY_INLINE void PrefetchGroups(const PanelArgs& args, std::int64_t first, std::int64_t count) {
  const auto fetch = [&](const std::byte* base, std::int64_t bytes) {
    for (std::int64_t at = first * bytes; at < (first + count) * bytes; at += 64)
      __builtin_prefetch(base + at, 0, 2);
  };
  constexpr std::int64_t kFloats = kPanelColumns * sizeof(float);
  if (args.group_scales != nullptr)
    fetch(args.group_scales, kPanelColumns * bytes_of(args.group_scale_form));
  if (args.group_offsets != nullptr)
    fetch(reinterpret_cast<const std::byte*>(args.group_offsets), kFloats);
}

// What folding one group needs, copied out of args once.
struct GroupFold {
  HWY_INLINE GroupFold(const PanelArgs& args, std::int64_t g)
      : row_scales(args.row_scales),
        row_sums(args.row_sums),
        offsets(args.group_offsets == nullptr ? nullptr : args.group_offsets + g * kPanelColumns),
        group(g),
        scale_group(args.folds_per_row_scale == 1 ? g : g / args.folds_per_row_scale) {}
  const float* const* row_scales;
  const float* const* row_sums;
  const float* offsets;
  std::int64_t group, scale_group;

  HWY_INLINE bool plain() const { return row_scales == nullptr && offsets == nullptr; }

  // One vector of columns of one row: what a group's sum adds to the running result. kPlain: the
  // columns' scales are all there is.
  template <bool kPlain>
  HWY_INLINE VF Into(VF total, VF acc, VF scale, int row, int column) const {
    if constexpr (kPlain) return hn::MulAdd(acc, scale, total);
    if (row_scales != nullptr) scale = hn::Mul(scale, hn::Set(df, row_scales[row][scale_group]));
    total = hn::MulAdd(acc, scale, total);
    if (offsets == nullptr) return total;
    return hn::NegMulAdd(hn::LoadU(df, offsets + column), hn::Set(df, row_sums[row][group]), total);
  }
};

template <bool kPlain, int MR, int NV>
HWY_INLINE void AddColumns(const GroupFold& fold, const VF (&acc)[MR][NV], const float* scales,
                           float* result, int row, int column) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const int c = column + v * kLanes;
    const VF scale = hn::LoadU(df, scales + c);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      float* p = result + r * kPanelColumns + c;
      hn::Store(fold.Into<kPlain>(hn::Load(df, p), acc[r][v], scale, row + r, c), df, p);
    }
  }
}

// The same into the result in memory, for MR rows from `row` and NV vectors from `column`.
template <int MR, int NV>
HWY_INLINE void FoldColumns(const PanelArgs& args, const VF (&acc)[MR][NV], const float* scales,
                            std::int64_t group, int row, int column) {
  const GroupFold fold(args, group);
  float* result = args.result + row * kPanelColumns;
  if (fold.plain()) {
    AddColumns<true>(fold, acc, scales, result, row, column);
  } else {
    AddColumns<false>(fold, acc, scales, result, row, column);
  }
}

// --- fp32 left operands

// One decoded group for MR rows; args.panel_scales are the group's 64 factors.
struct GroupTiles {
  template <int MR, bool kPrefetch>
  struct Tile {
    static HWY_NOINLINE void Run(const PanelArgs& args, const std::byte* w, int row,
                                 std::int64_t group, std::int64_t k_count) {
      const float* a[MR];
      for (int r = 0; r < MR; ++r)
        a[r] = static_cast<const float*>(args.rows[row + r]) + group * k_count;
      constexpr int kVectors = kVectorsOfRows<MR>;
      for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
        VF acc[MR][kVectors];
        ClearTile<MR>(acc);
        const std::byte* p = w + column * 4;
        for (std::int64_t k = 0; k < k_count; k += 2, p += kUnitBytes) {
          StepF32<DecodeBF16, 0, MR>(p, a, k, acc);
          StepF32<DecodeBF16, 1, MR>(p, a, k, acc);
        }
        FoldColumns<MR, kVectors>(args, acc, args.panel_scales, group, row, column);
      }
    }
  };
};

// One group for one or two rows, decoded where it is multiplied: nothing goes through memory.
template <class Unit, int S, int MR, int NV>
HWY_INLINE void StepOfRaw(const typename Unit::Raw& raw, const float* const (&a)[MR],
                          std::int64_t k, int v, VF (&acc)[MR][NV]) {
  const VF w = Unit::template Step<S>(raw);
#pragma GCC unroll 2
  for (int r = 0; r < MR; ++r) acc[r][v] = hn::MulAdd(w, hn::Set(df, a[r][k + S]), acc[r][v]);
  if constexpr (S + 1 < Unit::kSteps) StepOfRaw<Unit, S + 1, MR, NV>(raw, a, k, v, acc);
}
template <class Unit, int MR>
HWY_NOINLINE void DirectTile(const PanelArgs& args, const std::byte* w, const float* scales,
                             std::int64_t group) {
  constexpr int kVectors = kVectorsOfRows<MR>;
  const float* a[MR];
  for (int r = 0; r < MR; ++r) a[r] = static_cast<const float*>(args.rows[r]) + group * args.fold;
  for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    VF acc[MR][kVectors];
    ClearTile<MR>(acc);
    const std::byte* p = w + column * 4;
    for (std::int64_t k = 0; k < args.fold; k += Unit::kSteps, p += Unit::kBytes) {
      for (std::int64_t plane = 0; column == 0 && plane < Unit::kBytes; plane += kUnitBytes)
        PrefetchUnit(p + plane + kPrefetchBytes);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        StepOfRaw<Unit, 0, MR, kVectors>(typename Unit::Raw(args, p + v * 4 * kLanes), a, k, v,
                                         acc);
      }
    }
    FoldColumns<MR, kVectors>(args, acc, scales, group, 0, column);
  }
}
template <class Unit>
void GroupedGemmOfFewRows(const PanelArgs& args) {
  HWY_ALIGN float buffer[kPanelColumns];
  const std::byte* w = args.panel;
  for (std::int64_t group = 0; group < args.padded_k / args.fold; ++group) {
    const float* scales = ExpandScales(args, group, buffer);
    if (Unit::kDirectRows == 1 || args.num_rows == 1) {
      DirectTile<Unit, 1>(args, w, scales, group);
    } else {
      DirectTile<Unit, Unit::kDirectRows>(args, w, scales, group);
    }
    w += args.fold / Unit::kSteps * Unit::kBytes;
  }
}

// Each group is decoded once into L1 (at most 16 KiB), tiles of rows pass over it.
template <class Unit>
void GroupedGemmF32(const PanelArgs& args) {
  ClearResult(args);
  if constexpr (Unit::kDirectRows > 0) {
    if (args.num_rows <= Unit::kDirectRows) return GroupedGemmOfFewRows<Unit>(args);
  }
  HWY_ALIGN std::uint32_t block[kGroup / 2 * kPanelColumns];
  HWY_ALIGN float buffer[kPanelColumns];
  PanelArgs inner = args;
  const std::byte* w = args.panel;
  const std::int64_t groups = args.padded_k / args.fold;
  for (std::int64_t group = 0; group < groups; ++group) {
    inner.panel_scales = ExpandScales(args, group, buffer);
    std::uint32_t* out = block;
    for (int k = 0; k < args.fold; k += Unit::kSteps, w += Unit::kBytes) {
      for (std::int64_t plane = 0; plane < Unit::kBytes; plane += kUnitBytes)
        PrefetchUnit(w + plane + kPrefetchBytes);
      Unit::Decode(args, group, w, out);
      out += Unit::kSteps / 2 * kPanelColumns;
    }
    RowTiles<GroupTiles::Tile, false>(inner, reinterpret_cast<const std::byte*>(block), group,
                                      args.fold);
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
