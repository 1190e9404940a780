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

#include "cpu/panel_gemm-inl.h"

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

// --- Formats: one unit of kBytes to bf16 pairs of steps, [kSteps / 2][64]

// 4-bit codes of any meaning: bytes of a table of 16 bf16 values. Bytes of even steps are taken to the
// front of a block of 16, those of odd steps behind them; then the lower and the upper bytes of
// values, next to one another, are those of one pair of steps.
struct UnitCode4 {
  static constexpr int kSteps = 8;
  static constexpr std::int64_t kBytes = kUnitBytes;
  static HWY_INLINE void Decode(const PanelArgs& args, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    const hn::Repartition<std::uint16_t, DF> du16;
    const hn::Repartition<std::uint8_t, DF> du8;
    alignas(16) static constexpr std::uint8_t kOrder[16] = {0, 2, 4, 6, 8, 10, 12, 14,
                                                            1, 3, 5, 7, 9, 11, 13, 15};
    const auto order = hn::LoadDup128(du8, kOrder);
    const auto low = hn::LoadDup128(du8, args.codes->low);
    const auto high = hn::LoadDup128(du8, args.codes->high);
    const auto nibble = hn::Set(du8, 15);
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const auto raw = hn::TableLookupBytes(
          hn::Load(du8, reinterpret_cast<const std::uint8_t*>(w + 4 * c)), order);
      const auto upper = hn::BitCast(du8, hn::ShiftRight<4>(hn::BitCast(du16, raw)));
      const decltype(raw) code[2] = {hn::And(raw, nibble), hn::And(upper, nibble)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const auto l = hn::TableLookupBytes(low, code[i]), h = hn::TableLookupBytes(high, code[i]);
        const auto first = hn::BitCast(du32, hn::InterleaveLower(du8, l, h));
        const auto second = hn::BitCast(du32, hn::InterleaveUpper(du8, l, h));
        hn::Store(first, du32, out + i * kPanelColumns + c);
        hn::Store(second, du32, out + (i + 2) * kPanelColumns + c);
      }
    }
  }
};

struct UnitE4M3 {
  static constexpr int kSteps = 4;
  static constexpr std::int64_t kBytes = kUnitBytes;
  static HWY_INLINE void Decode(const PanelArgs&, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    for (int c = 0; c < kPanelColumns; c += kLanes)
      DecodeColumnsE4M3(w + 4 * c, out + c, out + kPanelColumns + c);
  }
};

// (k even, k odd) of each column, integers of kBits bits at the top of 16-bit lanes, whatever is below
// -> bf16 pair. fp32 of such an integer has zeros below its upper half.
template <int kBits>
HWY_INLINE void StoreIntegerPair(hn::Vec<decltype(du32)> lanes, std::uint32_t* out) {
  constexpr int kShift = 32 - kBits;
  const auto even =
      hn::ConvertTo(df, hn::ShiftRight<kShift>(hn::ShiftLeft<16>(hn::BitCast(di32, lanes))));
  const auto odd = hn::ConvertTo(df, hn::ShiftRight<kShift>(hn::BitCast(di32, lanes)));
  hn::Store(hn::Or(hn::ShiftRight<16>(hn::BitCast(du32, even)), hn::BitCast(du32, odd)), du32, out);
}

struct UnitI8 {
  static constexpr int kSteps = 4;
  static constexpr std::int64_t kBytes = kUnitBytes;
  static HWY_INLINE void Decode(const PanelArgs&, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    const hn::Repartition<std::uint8_t, DF> du8;
    const auto zero = hn::Zero(du8);
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const auto raw = hn::Load(du8, reinterpret_cast<const std::uint8_t*>(w + 4 * c));
      StoreIntegerPair<8>(hn::BitCast(du32, hn::InterleaveLower(du8, zero, raw)), out + c);
      StoreIntegerPair<8>(hn::BitCast(du32, hn::InterleaveUpper(du8, zero, raw)),
                          out + kPanelColumns + c);
    }
  }
};

// Three planes, sixteen steps: packed_weights.cc.
struct UnitI6 {
  static constexpr int kSteps = 16;
  static constexpr std::int64_t kBytes = 3 * kUnitBytes;
  static HWY_INLINE void Decode(const PanelArgs&, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    const hn::Repartition<std::uint16_t, DF> du16;
    const auto store = [&](int pair, hn::Vec<decltype(du16)> code,
                           std::uint32_t* to) MOESAIC_TIER_ATTR {
      StoreIntegerPair<6>(hn::BitCast(du32, code), to + pair * kPanelColumns);
    };
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      hn::Vec<decltype(du16)> word[3];
      for (int i = 0; i < 3; ++i)
        word[i] =
            hn::Load(du16, reinterpret_cast<const std::uint16_t*>(w + i * kUnitBytes + 4 * c));
      for (int i = 0; i < 3; ++i) {
        store(2 * i, hn::ShiftLeft<10>(word[i]), out + c);
        store(2 * i + 1, hn::ShiftLeft<4>(word[i]), out + c);
      }
      // The low four bits of each of the last two pairs, and the high two.
      const auto low = hn::Set(du16, 0x3C00U), high = hn::Set(du16, 0xC000U);
      store(6,
            hn::Or(hn::And(hn::ShiftRight<2>(word[0]), low),
                   hn::And(hn::ShiftLeft<2>(word[1]), high)),
            out + c);
      store(7, hn::Or(hn::And(hn::ShiftRight<2>(word[2]), low), hn::And(word[1], high)), out + c);
    }
  }
};

// int4 times an e4m3 scale of the column and group, rounded to e4m3: looked up element by element,
// for machines without the byte permutes of the bf16 tier, and there for scales of unusual size.
struct UnitInt4Fp8 {
  static constexpr int kSteps = 8;
  static constexpr std::int64_t kBytes = kUnitBytes;
  static void Decode(const PanelArgs& args, std::int64_t group, const std::byte* w,
                     std::uint32_t* out) {
    for (int c = 0; c < kPanelColumns; ++c) DecodeColumn(args, group, w, c, out + c);
  }
  // The four pairs of column c of the unit at w, kPanelColumns apart. Layout: packed_weights.cc.
  static void DecodeColumn(const PanelArgs& args, std::int64_t group, const std::byte* w, int c,
                           std::uint32_t* out) {
    const auto* scales = reinterpret_cast<const std::uint8_t*>(args.group_scales);
    const std::uint16_t* products = args.products->of[scales[group * kPanelColumns + c]];
    for (int pair = 0; pair < 4; ++pair) {
      const std::byte* at = w + c / 4 * 16 + pair % 2 * 8 + c % 4 * 2;
      const int shift = pair / 2 * 4;
      const std::uint32_t even = products[std::to_integer<unsigned>(at[0]) >> shift & 15U];
      const std::uint32_t odd = products[std::to_integer<unsigned>(at[1]) >> shift & 15U];
      out[pair * kPanelColumns] = even | odd << 16;
    }
  }
};

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

// Each group is decoded once into L1 (at most 16 KiB), tiles of rows pass over it.
template <class Unit>
void GroupedGemmF32(const PanelArgs& args) {
  ClearResult(args);
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
