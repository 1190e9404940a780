// The integer sums of one group where the machine has no 8-bit dot product (AVX2 without AVX-VNNI):
// one instruction adds two products of an unsigned and a signed byte, to 16 bits and saturating, and
// another two such sums to 32 bits. The same integers, so the same bits.
//
// - Codes of up to 5 bits: a span of quads, as many as cannot pass 16 bits, is added up there first.
// - Codes of 6 bits, whose span is two quads: both at once, without sums that are kept in 16 bits.
// - Codes of 8 bits: both sides are widened to 16 bits.
#if defined(MOESAIC_CPU_GROUP_SUMS_PAIRS_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_GROUP_SUMS_PAIRS_I8_INL_H_
#undef MOESAIC_CPU_GROUP_SUMS_PAIRS_I8_INL_H_
#else
#define MOESAIC_CPU_GROUP_SUMS_PAIRS_I8_INL_H_
#endif

#include "core/instrumented.h"
#include "cpu/group_steps_i8-inl.h"

#ifdef MOESAIC_TIER_BYTE_PAIRS
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Quads whose sums stay in 16 bits; 0: not even one.
template <class Unit>
inline constexpr int kSpanQuads = 32767 / (2 * 128 * Unit::kMost);

// Units of which not even two quads make a span: products in 16 bits.
template <class Unit>
inline constexpr bool kInWords = kSpanQuads<Unit> < 2;

// acc += both 16-bit sums of a lane.
HWY_INLINE VI AddPart(VI acc, VI part) {
  return VI{_mm256_add_epi32(acc.raw, _mm256_madd_epi16(part.raw, _mm256_set1_epi16(1)))};
}

template <int MR>
HWY_INLINE void ClearParts(VI (&part)[MR][kVectorsOfRows<MR>]) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfRows<MR>; ++v) part[r][v] = hn::Zero(di32);
  }
}
template <int MR>
HWY_INLINE void AddParts(const VI (&part)[MR][kVectorsOfRows<MR>],
                         VI (&acc)[MR][kVectorsOfRows<MR>]) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfRows<MR>; ++v) acc[r][v] = AddPart(acc[r][v], part[r][v]);
  }
}

// --- Units of which two quads make a span

template <class Unit>
inline constexpr bool kInTwos = kSpanQuads<Unit> == 2 || kSpanQuads<Unit> == 3;

// acc += the products of two quads and of the codes of a row. (Twelve sums, two vectors of weights and
// two of codes are all registers that there are: the codes are read where they are multiplied; what
// assembler reads no sanitizer checks.)
HWY_INLINE void AddTwoQuads(VI& acc, VI w0, VI w1, const std::uint8_t* codes) {
  alignas(32) static constexpr std::int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1,
                                                         1, 1, 1, 1, 1, 1, 1, 1};
#if MOESAIC_INSTRUMENTED
  static_cast<void>(*static_cast<const volatile std::uint8_t*>(codes + 7));
#endif
  VI x0, x1;
  __asm__(
      "vpbroadcastd %5, %1\n\tvpbroadcastd %6, %2\n\t"
      "vpmaddubsw %1, %3, %1\n\tvpmaddubsw %2, %4, %2\n\tvpaddw %2, %1, %1\n\t"
      "vpmaddwd %7, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(acc.raw), "=&x"(x0.raw), "=&x"(x1.raw)
      : "x"(w0.raw), "x"(w1.raw), "m"(*reinterpret_cast<const std::uint8_t(*)[4]>(codes)),
        "m"(*reinterpret_cast<const std::uint8_t(*)[4]>(codes + 4)), "m"(kOnes));
}

// Two units that are a quad each.
template <class Unit>
struct TwoUnits : Unit {
  static_assert(Unit::kSteps == 4);
  static constexpr int kSteps = 8;
  static constexpr std::int64_t kBytes = 2 * Unit::kBytes;
  using Raw = RawQuads<2>;
  template <int Q>
  static HWY_INLINE VI Quad(const Raw& raw) {
    return raw.plane[Q];
  }
};
template <class Unit>
using UnitOfTwos = std::conditional_t<Unit::kSteps == 4, TwoUnits<Unit>, Unit>;

// All quads of a unit, two at once.
template <class Unit, int MR>
struct UnitTwosI8 {
  const std::byte* unit;
  const std::uint8_t* const (&a)[MR];
  int at;
  VI (&acc)[MR][kVectorsOfRows<MR>];
  template <int Q>
  HWY_INLINE void Do() const {
    if constexpr (Q % 2 == 0) Two<Q>();
  }
  template <int Q>
  HWY_INLINE void Two() const {
    const std::byte* from = unit;
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfRows<MR>; ++v) {
      __asm__("" : "+r"(from));  // weights of other columns would push sums out of registers
      const typename Unit::Raw raw(from, v);
      const VI w0 = Unit::template Quad<Q>(raw), w1 = Unit::template Quad<Q + 1>(raw);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        AddTwoQuads(acc[r][v], w0, w1, a[r] + at + 4 * Q);
      }
    }
  }
};

// As ChainOfQuads, two quads a span.
struct SpansOfQuads {
  template <class Unit, std::size_t kQuads, std::size_t... Q>
  static HWY_INLINE VI Add(const typename Unit::Raw& raw, const VI (&x)[kQuads], VI acc,
                           std::index_sequence<Q...>) {
    static_assert(kSpanQuads<Unit> == 2 && kQuads % 2 == 0);
    VI part[kQuads / 2];
#pragma GCC unroll 4
    for (VI& sums : part) sums = hn::Zero(di32);
    (AddQuads(part[Q / 2], Unit::template Quad<Q>(raw), x[Q]), ...);
#pragma GCC unroll 4
    for (const VI& sums : part) acc = AddPart(acc, sums);
    return acc;
  }
};

// --- Units whose codes are multiplied in 16 bits

// acc += products of two 16-bit numbers, per lane.
HWY_INLINE void AddWide(VI& acc, VI w, VI x) {
  VI sums;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
          : "+x"(acc.raw), "=&x"(sums.raw)
          : "x"(w.raw), "x"(x.raw));
}

// The rows' codes of a block, even and odd steps of a quad apart, two to a word.
template <int MR>
struct WideRows {
  alignas(32) std::int32_t words[2][MR][kMaxI8Steps / 4];

  HWY_INLINE WideRows(const std::uint8_t* const (&a)[MR], int groups, int steps) {
    for (int r = 0; r < MR; ++r) {
      const std::uint8_t* from = a[r];
      const int group_bytes =
          MOESAIC_FAULT(cpu_wide_rows_repeat_the_first_group) ? 0 : steps + kI8StartBytes;
      for (int g = 0, at = 0; g < groups; ++g, from += group_bytes) {
        for (int k = 0; k < steps; k += kFinestI8Group, at += kFinestI8Group / 4) {
          const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k));
          const __m128i even = _mm_srai_epi16(_mm_slli_epi16(codes, 8), 8);
          _mm_store_si128(reinterpret_cast<__m128i*>(words[0][r] + at), even);
          _mm_store_si128(reinterpret_cast<__m128i*>(words[1][r] + at), _mm_srai_epi16(codes, 8));
        }
      }
    }
  }
};
template <class Unit, int MR>
using I8TileRowsOf = std::conditional_t<kInWords<Unit>, WideRows<MR>, RowsAsTheyLie<MR>>;

template <int MR, int kLines>
HWY_INLINE void SumWide(const std::byte*& unit, const WideRows<MR>& rows, int first, int steps,
                        bool fetches, const std::byte*& fetch, VI (&acc)[MR][kVectorsOfRows<MR>]) {
  constexpr int kVectors = kVectorsOfRows<MR>;
  const int end = first + steps / 4;
  for (int quad = first; quad < end; ++quad, unit += kUnitBytes) {
    if (fetches) FetchLines<kLines>(fetch);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      VI w[kVectors];
      __asm__("" : "+r"(unit));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const VI codes = LoadLanes(unit, v);
        w[v] = odd == 0 ? hn::And(codes, hn::Set(di32, 0x00FF00FF))
                        : VI{_mm256_srli_epi16(codes.raw, 8)};
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        const VI x = hn::Set(di32, rows.words[odd][r][quad]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) AddWide(acc[r][v], w[v], x);
      }
    }
  }
}

// As in group_sums_i8-inl.h.
template <class Unit, int MR, int kLines>
HWY_INLINE void SumGroup(const std::byte*& unit, const I8TileRowsOf<Unit, MR>& rows, int group,
                         const std::uint8_t* const (&a)[MR], int steps, bool fetches,
                         const std::byte*& fetch, VI (&acc)[MR][kVectorsOfRows<MR>]) {
  StartGroup<Unit, MR>(a, acc);
  if constexpr (kInWords<Unit>) {
    SumWide<MR, kLines>(unit, rows, group * (steps / 4), steps, fetches, fetch, acc);
  } else {
    if constexpr (kInTwos<Unit>) {
      using Two = UnitOfTwos<Unit>;
      for (int k = 0; k < steps; k += Two::kSteps, unit += Two::kBytes) {
        if (fetches) FetchLines<kLines*(Two::kBytes / Unit::kBytes)>(fetch);
        if constexpr (MR == 1) {
          UnitOfRowI8<Two, SpansOfQuads>(unit, a[0] + k, acc[0]);
        } else {
          ForQuads<Two>(UnitTwosI8<Two, MR>{unit, a, k, acc});
        }
      }
    } else {
      VI part[MR][kVectorsOfRows<MR>];
      const int span = MOESAIC_FAULT(cpu_byte_pairs_pass_16_bits) ? steps : 4 * kSpanQuads<Unit>;
      for (int k = 0; k < steps;) {
        ClearParts<MR>(part);
        const int end = HWY_MIN(k + span, steps);
        for (; k < end; k += Unit::kSteps, unit += Unit::kBytes) {
          if (fetches) FetchLines<kLines>(fetch);
          if constexpr (MR == 1) {
            UnitOfRowI8<Unit, ChainOfQuads>(unit, a[0] + k, part[0]);
          } else {
            ForQuads<Unit>(UnitStepI8<Unit, MR>{unit, a, k, part});
          }
        }
        AddParts<MR>(part, acc);
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_BYTE_PAIRS

#endif  // per-target include guard
