// Weights of the grouped panel GEMM (panel_gemm_grouped-inl.h): what each format contributes.
#if defined(MOESAIC_CPU_PANEL_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_UNITS_INL_H_
#undef MOESAIC_CPU_PANEL_UNITS_INL_H_
#else
#define MOESAIC_CPU_PANEL_UNITS_INL_H_
#endif

#include "cpu/panel_gemm-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Decode: one unit of kBytes to bf16 pairs of steps, [kSteps / 2][64]. kDirectRows: up to so many rows
// take units as they lie, by Raw, a vector of columns of a unit at w, and Step<S>, step S of that.

// 4-bit codes of any meaning: bytes of a table of 16 bf16 values. Bytes of even steps are taken to the
// front of a block of 16, those of odd steps behind them; then the lower and the upper bytes of
// values, next to one another, are those of one pair of steps.
struct UnitCode4 {
  static constexpr int kSteps = 8, kDirectRows = 1;
  static constexpr std::int64_t kBytes = kUnitBytes;
  struct Raw {
    hn::Vec<decltype(du32)> pair[4];
    HWY_INLINE Raw(const PanelArgs& args, const std::byte* w) {
      const hn::Repartition<std::uint16_t, DF> du16;
      const hn::Repartition<std::uint8_t, DF> du8;
      alignas(16) static constexpr std::uint8_t kOrder[16] = {0, 2, 4, 6, 8, 10, 12, 14,
                                                              1, 3, 5, 7, 9, 11, 13, 15};
      const auto low = hn::LoadDup128(du8, args.codes->low);
      const auto high = hn::LoadDup128(du8, args.codes->high);
      const auto nibble = hn::Set(du8, 15);
      const auto raw = hn::TableLookupBytes(hn::Load(du8, reinterpret_cast<const std::uint8_t*>(w)),
                                            hn::LoadDup128(du8, kOrder));
      const auto upper = hn::BitCast(du8, hn::ShiftRight<4>(hn::BitCast(du16, raw)));
      const decltype(raw) code[2] = {hn::And(raw, nibble), hn::And(upper, nibble)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const auto l = hn::TableLookupBytes(low, code[i]), h = hn::TableLookupBytes(high, code[i]);
        pair[i] = hn::BitCast(du32, hn::InterleaveLower(du8, l, h));
        pair[i + 2] = hn::BitCast(du32, hn::InterleaveUpper(du8, l, h));
      }
    }
  };
  template <int S>
  static HWY_INLINE VF Step(const Raw& raw) {
    const auto pair = raw.pair[S / 2];
    return hn::BitCast(
        df, S % 2 == 0 ? hn::ShiftLeft<16>(pair) : hn::And(pair, hn::Set(du32, 0xFFFF0000U)));
  }
  static HWY_INLINE void Decode(const PanelArgs& args, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const Raw raw(args, w + 4 * c);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) hn::Store(raw.pair[i], du32, out + i * kPanelColumns + c);
    }
  }
};

struct UnitE4M3 {
  static constexpr int kSteps = 4, kDirectRows = 2;
  static constexpr std::int64_t kBytes = kUnitBytes;
  struct Raw {
    const std::byte* at;
    HWY_INLINE Raw(const PanelArgs&, const std::byte* w) : at(w) {}
  };
  template <int S>
  static HWY_INLINE VF Step(const Raw& raw) {
    return DecodeE4M3::Step<S>(raw.at);
  }
  static HWY_INLINE void Decode(const PanelArgs&, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    for (int c = 0; c < kPanelColumns; c += kLanes)
      DecodeColumnsE4M3(w + 4 * c, out + c, out + kPanelColumns + c);
  }
};

// The integer of kBits bits from bit kFirst on of each lane.
template <int kBits, int kFirst>
HWY_INLINE VF IntegerAt(hn::Vec<decltype(di32)> lanes) {
  constexpr int kAbove = 32 - kBits - kFirst;
  if constexpr (kAbove > 0) lanes = hn::ShiftLeft<kAbove>(lanes);
  return hn::ConvertTo(df, hn::ShiftRight<32 - kBits>(lanes));
}

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
  static constexpr int kSteps = 4, kDirectRows = 2;
  static constexpr std::int64_t kBytes = kUnitBytes;
  // Both pairs, bytes at the top of 16-bit lanes.
  struct Raw {
    hn::Vec<decltype(di32)> pair[2];
    HWY_INLINE Raw(const PanelArgs&, const std::byte* w) {
      const hn::Repartition<std::uint8_t, DF> du8;
      const auto zero = hn::Zero(du8);
      const auto codes = hn::Load(du8, reinterpret_cast<const std::uint8_t*>(w));
      pair[0] = hn::BitCast(di32, hn::InterleaveLower(du8, zero, codes));
      pair[1] = hn::BitCast(di32, hn::InterleaveUpper(du8, zero, codes));
    }
  };
  template <int S>
  static HWY_INLINE VF Step(const Raw& raw) {
    return IntegerAt<8, 8 + S % 2 * 16>(raw.pair[S / 2]);
  }
  static HWY_INLINE void Decode(const PanelArgs& args, std::int64_t, const std::byte* w,
                                std::uint32_t* out) {
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const Raw raw(args, w + 4 * c);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        StoreIntegerPair<8>(hn::BitCast(du32, raw.pair[i]), out + i * kPanelColumns + c);
    }
  }
};

// Three planes, sixteen steps: packed_weights.cc.
struct UnitI6 {
  static constexpr int kSteps = 16, kDirectRows = 1;
  static constexpr std::int64_t kBytes = 3 * kUnitBytes;
  struct Raw {
    hn::Vec<decltype(di32)> word[3];
    HWY_INLINE Raw(const PanelArgs&, const std::byte* w) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i)
        word[i] = hn::Load(di32, reinterpret_cast<const std::int32_t*>(w + i * kUnitBytes));
    }
  };
  template <int S>
  static HWY_INLINE VF Step(const Raw& raw) {
    if constexpr (S < 12) {
      return IntegerAt<6, S % 4 / 2 * 6 + S % 2 * 16>(raw.word[S / 4]);
    } else {
      // The low four bits of a pair and the high two, at the top of 16-bit lanes.
      const auto low = hn::Set(di32, 0x3C003C00),
                 high = hn::Set(di32, static_cast<int>(0xC000C000));
      const auto pair =
          S < 14 ? hn::Or(hn::And(hn::ShiftRight<2>(raw.word[0]), low),
                          hn::And(hn::ShiftLeft<2>(raw.word[1]), high))
                 : hn::Or(hn::And(hn::ShiftRight<2>(raw.word[2]), low), hn::And(raw.word[1], high));
      return IntegerAt<6, 10 + S % 2 * 16>(pair);
    }
  }
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
  static constexpr int kSteps = 8, kDirectRows = 0;
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

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
