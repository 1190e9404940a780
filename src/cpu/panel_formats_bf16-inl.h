// What a weight format contributes to the grouped panel GEMM on the bf16 dot-product instruction: 16
// columns of a unit to bf16 pairs of steps. Tiles: panel_gemm_grouped_bf16-inl.h.
#if defined(MOESAIC_CPU_PANEL_FORMATS_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_FORMATS_BF16_INL_H_
#undef MOESAIC_CPU_PANEL_FORMATS_BF16_INL_H_
#else
#define MOESAIC_CPU_PANEL_FORMATS_BF16_INL_H_
#endif

#include <bit>

#include "cpu/e4m3-inl.h"
#include "cpu/panel_gemm_grouped-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// A unit of kSteps steps has kBytes. `Decode` is for what `Load` reads of 16 columns of one, `Begin` for what a format holds of a group in slot 0 or 1
// (false: the group's scales want the slower AnyScale), `Scales` for the columns' factors of its
// fold. kByPairs: `Pair<P>` decodes one pair of steps alone.
template <class Pairs>
struct ScaledPairs {
  static constexpr bool kByPairs = false;
  static constexpr std::int64_t kBytes = kUnitBytes;
  static HWY_INLINE __m512i Load(const std::byte* w) { return _mm512_load_si512(w); }
  static constexpr int kGroupsAtOnce = 1;  // of one row
  using AnyScale = Pairs;
  static HWY_INLINE bool Begin(const PanelArgs&, std::int64_t, int) { return true; }
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    return ExpandScales(args, group, buffer);
  }
};

// 4-bit codes: a nibble is the index of a table of bf16 values, and a permute of 16-bit lanes looks
// at the lowest bits of its index only (bit 4 belongs to the next nibble, so the table is there
// twice): eight steps of sixteen columns take three shifts and four permutes.
struct PairsCode4 : ScaledPairs<PairsCode4> {
  static constexpr int kSteps = 8;
  static constexpr bool kByPairs = true;
  __m512i table;
  explicit PairsCode4(const PanelArgs& args) : table(_mm512_load_si512(args.codes->values)) {}
  template <int P>
  HWY_INLINE __m512i Pair(__m512i raw) const {
    return _mm512_permutexvar_epi16(P == 0 ? raw : _mm512_srli_epi16(raw, 4 * P), table);
  }
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[4], int) const {
    pair[0] = Pair<0>(raw);
    pair[1] = Pair<1>(raw);
    pair[2] = Pair<2>(raw);
    pair[3] = Pair<3>(raw);
  }
};

struct PairsE4M3 : ScaledPairs<PairsE4M3> {
  static constexpr int kSteps = 4;
  TablesE4M3 tables;
  explicit PairsE4M3(const PanelArgs&) : tables(LoadTablesE4M3()) {}
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[2], int) const {
    DecodePairs(tables, raw, pair[0], pair[1]);
  }
};

// Lower and upper byte of the integers 0 to 127 as bf16 (exact).
struct BytesI8 {
  alignas(64) std::uint8_t low[128];
  alignas(64) std::uint8_t high[128];
};
constexpr BytesI8 MakeBytesI8() {
  BytesI8 t{};
  for (int value = 0; value < 128; ++value) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    t.low[value] = static_cast<std::uint8_t>(bits >> 16 & 0xFFU);
    t.high[value] = static_cast<std::uint8_t>(bits >> 24);
  }
  return t;
}
constexpr BytesI8 kI8ToBF16 = MakeBytesI8();

// A byte permute looks at seven bits of its index: the magnitude, of which 128 looks like 0, as
// does its lower byte; its upper byte is put in.
struct PairsI8 : ScaledPairs<PairsI8> {
  static constexpr int kSteps = 4;
  __m512i low[2], high[2];
  explicit PairsI8(const PanelArgs&) {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(kI8ToBF16.low + 64 * i);
      high[i] = _mm512_load_si512(kI8ToBF16.high + 64 * i);
    }
  }
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[2], int) const {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i magnitude = _mm512_abs_epi8(raw);
    const __m512i lower = _mm512_permutex2var_epi8(low[0], magnitude, low[1]);
    __m512i upper = _mm512_permutex2var_epi8(high[0], magnitude, high[1]);
    upper = _mm512_mask_mov_epi8(upper, _mm512_cmpeq_epi8_mask(raw, sign), _mm512_set1_epi8(0x43));
    upper = _mm512_ternarylogic_epi32(upper, raw, sign, 0xF8);  // upper | (raw & sign)
    pair[0] = _mm512_unpacklo_epi8(lower, upper);
    pair[1] = _mm512_unpackhi_epi8(lower, upper);
  }
};

// The integers of 6 bits as bf16 (exact), by two's complement code.
struct ValuesI6 {
  alignas(64) std::uint16_t of[64];
};
constexpr ValuesI6 MakeValuesI6() {
  ValuesI6 t{};
  for (int code = 0; code < 64; ++code) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>((code ^ 32) - 32));
    t.of[code] = static_cast<std::uint16_t>(bits >> 16);
  }
  return t;
}
constexpr ValuesI6 kI6ToBF16 = MakeValuesI6();

// 6-bit codes: a permute of 16-bit lanes from two registers looks at six bits of its index. Layout:
// packed_weights.cc.
struct PairsI6 : ScaledPairs<PairsI6> {
  static constexpr int kSteps = 16;
  static constexpr bool kByPairs = true;
  static constexpr std::int64_t kBytes = 3 * kUnitBytes;
  struct Planes {
    __m512i word[3];
  };
  __m512i table[2];
  explicit PairsI6(const PanelArgs&) {
    for (int i = 0; i < 2; ++i) table[i] = _mm512_load_si512(kI6ToBF16.of + 32 * i);
  }
  static HWY_INLINE Planes Load(const std::byte* w) {
    return {{_mm512_load_si512(w), _mm512_load_si512(w + kUnitBytes),
             _mm512_load_si512(w + 2 * kUnitBytes)}};
  }
  template <int P>
  HWY_INLINE __m512i Pair(const Planes& planes) const {
    const __m512i(&word)[3] = planes.word;
    if constexpr (P < 6) {
      return Look(P % 2 == 0 ? word[P / 2] : _mm512_srli_epi16(word[P / 2], 6));
    } else {  // low | (high & 0x30)
      const __m512i low = _mm512_srli_epi16(word[P == 6 ? 0 : 2], 12);
      const __m512i high = _mm512_srli_epi16(word[1], P == 6 ? 8 : 10);
      return Look(_mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(0x30), 0xF8));
    }
  }
  HWY_INLINE void Decode(int, const Planes& planes, __m512i (&pair)[8], int) const {
    pair[0] = Pair<0>(planes);
    pair[1] = Pair<1>(planes);
    pair[2] = Pair<2>(planes);
    pair[3] = Pair<3>(planes);
    pair[4] = Pair<4>(planes);
    pair[5] = Pair<5>(planes);
    pair[6] = Pair<6>(planes);
    pair[7] = Pair<7>(planes);
  }
  HWY_INLINE __m512i Look(__m512i index) const {
    return _mm512_permutex2var_epi16(table[0], index, table[1]);
  }
};

// int4 times an e4m3 scale, rounded to e4m3: four significant bits, so that the rounding depends on
// the scale's mantissa alone and its exponent is a factor of the fold. (No product is rounded more
// coarsely: those of subnormal scales are integers in units of the smallest subnormal.) 8 mantissas
// x 16 codes fill a byte permute.
struct ProductsE4M3 {
  alignas(64) std::uint8_t low[128];  // bf16 by mantissa * 16 + code, for a scale of exponent 0
  alignas(64) std::uint8_t high[128];
};
constexpr ProductsE4M3 MakeProductsE4M3() {
  ProductsE4M3 t{};
  for (int mantissa = 0; mantissa < 8; ++mantissa) {
    for (int code = 0; code < 16; ++code) {
      const int value = (code ^ 8) - 8;
      const int magnitude = (8 + mantissa) * (value < 0 ? -value : value);  // in units of 2^-3
      int top = 0;
      while ((magnitude >> top) > 15) ++top;  // four significant bits, ties to even
      const int rest = magnitude & ((1 << top) - 1), half = top > 0 ? 1 << (top - 1) : 1;
      int kept = magnitude >> top;
      if (top > 0 && (rest > half || (rest == half && kept % 2 != 0))) ++kept;
      const auto product = static_cast<float>(kept << top) * 0x1p-3F;
      const auto bits = std::bit_cast<std::uint32_t>(value < 0 ? -product : product);
      t.low[mantissa * 16 + code] = static_cast<std::uint8_t>(bits >> 16 & 0xFFU);
      t.high[mantissa * 16 + code] = static_cast<std::uint8_t>(bits >> 24);
    }
  }
  return t;
}
constexpr ProductsE4M3 kProductsE4M3 = MakeProductsE4M3();

// Any scale: element by element. Such scales (negative, NaN, or so large that products saturate)
// come from no quantiser.
struct PairsInt4Fp8AnyScale : ScaledPairs<PairsInt4Fp8AnyScale> {
  static constexpr int kSteps = 8;
  static constexpr bool kHoldsGroup = true;
  const PanelArgs* args = nullptr;
  std::int64_t group = 0;
  explicit PairsInt4Fp8AnyScale(const PanelArgs&) {}
  bool Begin(const PanelArgs& panel, std::int64_t g, int) {
    args = &panel;
    group = g;
    return true;
  }
  HWY_NOINLINE void Decode(int v, __m512i raw, __m512i (&pair)[4], int) const {
    alignas(64) std::byte unit[kUnitBytes];
    alignas(64) std::uint32_t out[4 * kPanelColumns];
    _mm512_store_si512(unit + 64 * v, raw);
    for (int c = 16 * v; c < 16 * v + 16; ++c)
      UnitInt4Fp8::DecodeColumn(*args, group, unit, c, out + c);
    for (int p = 0; p < 4; ++p) pair[p] = _mm512_load_si512(out + p * kPanelColumns + 16 * v);
  }
};

struct PairsInt4Fp8 {
  static constexpr int kSteps = 8;
  static constexpr std::int64_t kBytes = kUnitBytes;
  static HWY_INLINE __m512i Load(const std::byte* w) { return _mm512_load_si512(w); }
  static constexpr bool kHoldsGroup = true;
  static constexpr bool kByPairs = false;
  // In one group the four chains of a row would wait for what is decoded and for each other.
  static constexpr int kGroupsAtOnce = 2;
  using AnyScale = PairsInt4Fp8AnyScale;
  __m512i low[2], high[2];
  __m512i mantissa[2][4];  // by slot: of each byte's column, times 16
  explicit PairsInt4Fp8(const PanelArgs&) {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(kProductsE4M3.low + 64 * i);
      high[i] = _mm512_load_si512(kProductsE4M3.high + 64 * i);
    }
  }
  static HWY_INLINE const std::uint8_t* Codes(const PanelArgs& args, std::int64_t group) {
    return reinterpret_cast<const std::uint8_t*>(args.group_scales) + group * kPanelColumns;
  }
  HWY_INLINE bool Begin(const PanelArgs& args, std::int64_t group, int slot) {
    const std::uint8_t* codes = Codes(args, group);
    // Bytes of a quad of columns: two steps of each, twice.
    const __m512i columns = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3)),
        _mm512_set_epi32(0x0C0C0C0C, 0x0C0C0C0C, 0x0C0C0C0C, 0x0C0C0C0C, 0x08080808, 0x08080808,
                         0x08080808, 0x08080808, 0x04040404, 0x04040404, 0x04040404, 0x04040404, 0,
                         0, 0, 0));
    // The mantissa by code & 7 | 8; of subnormal codes (0 to 7) once they are normalised.
    const __m512i mantissas =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 4 << 4, 0, 2 << 4, 4 << 4, 6 << 4, 0, 1 << 4,
                                             2 << 4, 3 << 4, 4 << 4, 5 << 4, 6 << 4, 7 << 4));
    const __m512i normal = _mm512_set1_epi8(8), seven = _mm512_set1_epi8(7);
    for (int v = 0; v < 4; ++v) {
      const __m128i strip = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * v));
      const __m512i spread = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(strip), columns);
      const __mmask64 is_normal = _mm512_cmpge_epu8_mask(spread, normal);
      const __m512i index = _mm512_or_si512(_mm512_and_si512(spread, seven),
                                            _mm512_maskz_mov_epi8(is_normal, normal));
      mantissa[slot][v] = _mm512_shuffle_epi8(mantissas, index);
    }
    // Up to 56 (0x66) no product is above 448.
    const __m512i all = _mm512_loadu_si512(codes);
    return _mm512_cmpgt_epu8_mask(all, _mm512_set1_epi8(0x66)) == 0;
  }
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    if (MOESAIC_FAULT(cpu_int4_fp8_exponent_dropped)) return ExpandScales(args, group, buffer);
    const hn::Rebind<std::uint8_t, DF> d8;
    const std::uint8_t* codes = Codes(args, group);
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const auto code = hn::PromoteTo(du32, hn::LoadU(d8, codes + c));
      const auto bits = hn::BitCast(du32, DecodeE4M3::Widen(hn::ShiftLeft<24>(code)));
      hn::Store(hn::BitCast(df, hn::And(bits, hn::Set(du32, 0x7F800000U))), df, buffer + c);
    }
    return buffer;
  }
  HWY_INLINE void Decode(int v, __m512i raw, __m512i (&pair)[4], int slot) const {
    const __m512i nibble = _mm512_set1_epi8(15), column = mantissa[slot][v];
    // raw & 15 | mantissa
    Half(_mm512_ternarylogic_epi32(raw, nibble, column, 0xEA), pair[0], pair[1]);
    Half(_mm512_ternarylogic_epi32(_mm512_srli_epi16(raw, 4), nibble, column, 0xEA), pair[2],
         pair[3]);
  }
  HWY_INLINE void Half(__m512i index, __m512i& first, __m512i& second) const {
    const __m512i lower = _mm512_permutex2var_epi8(low[0], index, low[1]);
    const __m512i upper = _mm512_permutex2var_epi8(high[0], index, high[1]);
    first = _mm512_unpacklo_epi8(lower, upper);
    second = _mm512_unpackhi_epi8(lower, upper);
  }
};

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
