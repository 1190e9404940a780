// Weights as the 8-bit integer dot product reads them (panel_gemm_i8-inl.h): quads of four steps,
// and what each format contributes.
#if defined(MOESAIC_CPU_QUADS_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_QUADS_I8_INL_H_
#undef MOESAIC_CPU_QUADS_I8_INL_H_
#else
#define MOESAIC_CPU_QUADS_I8_INL_H_
#endif

#include "cpu/panel_gemm_grouped-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

using VI = hn::Vec<decltype(di32)>;

// acc += products of four unsigned bytes of w and four signed ones of x, per lane. (Highway 1.0 has
// no such operation, and with the intrinsic g++ 12 spills half of the accumulators.) Of byte pairs:
// sums of two products in 16 bits each (group_sums_pairs_i8-inl.h).
HWY_INLINE void AddQuads(VI& acc, VI w, VI x) {
#ifdef MOESAIC_TIER_BYTE_PAIRS
  VI pairs;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
          : "+x"(acc.raw), "=&x"(pairs.raw)
          : "x"(w.raw), "x"(x.raw));
#elif HWY_TARGET == HWY_AVX2
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.raw) : "x"(w.raw), "x"(x.raw));
#elif HWY_ARCH_ARM_A64
  __asm__("usdot %0.4s, %1.16b, %2.16b" : "+w"(acc.raw) : "w"(w.raw), "w"(x.raw));
#else
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.raw) : "v"(w.raw), "v"(x.raw));
#endif
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
  static constexpr int kSteps = 4, kMost = 255;  // kMost: a byte
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
  static constexpr int kMost = 15;
  static constexpr int kStartShift = 4;
};
static_assert(kDotBias4 << UnitQuads4InBytes::kStartShift == kDotBias);

struct UnitQuads4 {
  static constexpr int kSteps = 8, kMost = UnitQuads4InBytes::kMost;
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
  static constexpr int kMost = 28;
  static constexpr int kStartShift = 3;
  static constexpr bool kDoubled = true;
};
static_assert(kE2M1Bias << UnitQuadsE2M1InBytes::kStartShift == kDotBias);

// Codes that lie as those of UnitQuads4.
struct UnitQuadsE2M1 : UnitQuads4 {
  static constexpr int kMost = UnitQuadsE2M1InBytes::kMost;
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
  static constexpr int kMost = 63;
  static constexpr int kStartShift = 2;
};
static_assert(kDotBias6 << UnitQuads6InBytes::kStartShift == kDotBias);

// Three quads in three planes, and two bits of the fourth above each of them.
struct UnitQuads6 {
  static constexpr int kSteps = 16, kMost = UnitQuads6InBytes::kMost;
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

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_DOT8

#endif  // per-target include guard
