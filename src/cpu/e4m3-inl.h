// Decoding e4m3 weights: to fp32 vectors on every tier, to pairs of (exact) bf16 values by byte
// permutes on tiers that have them.
#if defined(MOESAIC_CPU_E4M3_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_E4M3_INL_H_
#undef MOESAIC_CPU_E4M3_INL_H_
#else
#define MOESAIC_CPU_E4M3_INL_H_
#endif

#include "cpu/simd-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

struct DecodeE4M3 {
  static constexpr int kSteps = 4;
  // Bytes of four columns: (k0,k1) of each column, then (k2,k3) of each: interleaving with zero
  // leaves code << 8 in 16-bit lanes, k even in the low half of each column.
  template <int S>
  static HWY_INLINE VF Step(const std::byte* p) {
    const hn::Repartition<std::uint8_t, DF> du8;
    const auto raw = hn::Load(du8, reinterpret_cast<const std::uint8_t*>(p));
    const auto zero = hn::Zero(du8);
    const auto pair = hn::BitCast(
        du32, S < 2 ? hn::InterleaveLower(du8, zero, raw) : hn::InterleaveUpper(du8, zero, raw));
    const auto code = S % 2 == 0 ? hn::ShiftLeft<16>(pair) : pair;  // seeemmm at bits 31..24
    return Widen(code);
  }
  // Sign to bit 31 and eeeemmm to bits 26..20: the fp32 whose exponent is 120 too small; the
  // product restores it and turns fp32 subnormals into the exact value of e4m3 subnormals.
  template <class VU>
  static HWY_INLINE VF Widen(VU code) {
    const auto shifted = hn::BitCast(du32, hn::ShiftRight<4>(hn::BitCast(di32, code)));
    const auto bits = hn::And(shifted, hn::Set(du32, 0x87F00000U));
    return hn::Mul(hn::BitCast(df, bits), hn::Set(df, 0x1p120F));
  }
};

#if MOESAIC_TIER_BF16

struct BytesE4M3 {
  alignas(64) std::uint8_t high[128];
  alignas(64) std::uint8_t low[128];
};
// bf16 of code c is exact: 4 significant bits, exponents -9..8.
constexpr BytesE4M3 MakeBytesE4M3() {
  BytesE4M3 t{};
  for (unsigned code = 0; code < 128; ++code) {
    unsigned exponent = code >> 3, mantissa = code & 7U;
    unsigned bits = 0;
    if (code == 127) {
      bits = 0x7FC0;  // NaN
    } else if (exponent > 0) {
      bits = ((exponent + 120U) << 7) | (mantissa << 4);
    } else if (mantissa > 0) {  // m * 2^-9 = 1.x * 2^(shift - 9)
      unsigned shift = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
      bits = ((127U - 9U + shift) << 7) | (((mantissa << (3 - shift)) & 7U) << 4);
    }
    t.high[code] = static_cast<std::uint8_t>(bits >> 8);
    t.low[code] = static_cast<std::uint8_t>(bits & 0xFFU);
  }
  return t;
}
constexpr BytesE4M3 kE4M3ToBF16 = MakeBytesE4M3();

// All 128 magnitudes of e4m3 as the high and the low byte of a bf16, each in two registers for a
// byte permute.
struct TablesE4M3 {
  __m512i high[2], low[2];
};

HWY_INLINE TablesE4M3 LoadTablesE4M3() {
  TablesE4M3 t;
  for (int i = 0; i < 2; ++i) {
    t.high[i] = _mm512_load_si512(kE4M3ToBF16.high + 64 * i);
    t.low[i] = _mm512_load_si512(kE4M3ToBF16.low + 64 * i);
  }
  return t;
}

// 64 codes (16 columns x 4 steps) -> bf16 pairs of steps (0,1) and (2,3).
HWY_INLINE void DecodePairs(const TablesE4M3& t, __m512i raw, __m512i& pair01, __m512i& pair23) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i low = _mm512_permutex2var_epi8(t.low[0], raw, t.low[1]);
  __m512i high = _mm512_permutex2var_epi8(t.high[0], raw, t.high[1]);
  high = _mm512_ternarylogic_epi32(high, raw, sign, 0xF8);  // high | (raw & sign)
  pair01 = _mm512_unpacklo_epi8(low, high);
  pair23 = _mm512_unpackhi_epi8(low, high);
}

// kLanes columns of a unit of codes at w -> bf16 pairs of steps (0,1) and (2,3).
HWY_INLINE void DecodeColumnsE4M3(const std::byte* w, std::uint32_t* pair01,
                                  std::uint32_t* pair23) {
  __m512i low, high;
  DecodePairs(LoadTablesE4M3(), _mm512_load_si512(w), low, high);
  _mm512_store_si512(pair01, low);
  _mm512_store_si512(pair23, high);
}

#else

// kLanes columns of a unit of codes at w -> bf16 pairs of steps (0,1) and (2,3).
HWY_INLINE void DecodeColumnsE4M3(const std::byte* w, std::uint32_t* pair01,
                                  std::uint32_t* pair23) {
  const auto pack = [](VF even, VF odd) {
    return hn::Or(hn::ShiftRight<16>(hn::BitCast(du32, even)),
                  hn::BitCast(du32, odd));  // odd has zero low half
  };
  hn::Store(pack(DecodeE4M3::Step<0>(w), DecodeE4M3::Step<1>(w)), du32, pair01);
  hn::Store(pack(DecodeE4M3::Step<2>(w), DecodeE4M3::Step<3>(w)), du32, pair23);
}

#endif

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
