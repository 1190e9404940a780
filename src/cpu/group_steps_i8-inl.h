// What the integer sums of a group (group_sums_i8-inl.h) are made of: rows and units of weights meet.
#if defined(MOESAIC_CPU_GROUP_STEPS_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_GROUP_STEPS_I8_INL_H_
#undef MOESAIC_CPU_GROUP_STEPS_I8_INL_H_
#else
#define MOESAIC_CPU_GROUP_STEPS_I8_INL_H_
#endif

#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/quads_i8-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Steps of a group at least, and of the groups that a tile meets at once at most.
inline constexpr int kFinestI8Group = 16, kFewI8Groups = 4, kMaxI8Steps = kFewI8Groups * kGroup;
// Before a group's codes of a row.
inline constexpr int kI8StartBytes = sizeof(std::int32_t);
HWY_INLINE std::int32_t StartOfGroup(const std::uint8_t* codes) {
  std::int32_t start;
  std::memcpy(&start, codes - kI8StartBytes, sizeof(start));
  return start;
}

// Nothing is made of a tile's rows before the first column.
template <int MR>
struct RowsAsTheyLie {
  HWY_INLINE RowsAsTheyLie(const std::uint8_t* const (&)[MR], int /*groups*/, int /*steps*/) {}
};

// Where the sums of a group of MR rows start.
template <class Unit, int MR>
HWY_INLINE void StartGroup(const std::uint8_t* const (&a)[MR], VI (&acc)[MR][kVectorsOfRows<MR>]) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    const std::int32_t start = StartOfGroup(a[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsOfRows<MR>; ++v)
      acc[r][v] = hn::Set(di32, start >> Unit::kStartShift);
  }
}

template <int kLines>
HWY_INLINE void FetchLines(const std::byte*& fetch) {
#pragma GCC unroll 12
  for (int line = 0; line < kLines; ++line) __builtin_prefetch(fetch + 64 * line, 0, 2);
  fetch += 64 * kLines;
}

// Four codes of a row, in every lane.
HWY_INLINE VI QuadOfRow(const std::uint8_t* codes) {
  std::int32_t quad;
  std::memcpy(&quad, codes, sizeof(quad));
  return hn::Set(di32, quad);
}
template <std::size_t kQuads>
HWY_INLINE void LoadQuadsOfRow(const std::uint8_t* codes, VI (&x)[kQuads]) {
#pragma GCC unroll 4
  for (std::size_t q = 0; q < kQuads; ++q) x[q] = QuadOfRow(codes + 4 * q);
}

// Quad Q of a unit, some vectors of columns, for MR rows. Weights are read again for every
// quad: in registers they would push accumulators out.
template <class Unit, int Q, int MR>
HWY_INLINE void StepI8(const std::byte* unit, const std::uint8_t* const (&a)[MR], int at,
                       VI (&acc)[MR][kVectorsOfRows<MR>]) {
  if constexpr (Unit::kSteps > 4) __asm__("" : "+r"(unit));
  constexpr int kVectors = kVectorsOfRows<MR>;
  VI w[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) w[v] = Unit::template Quad<Q>(typename Unit::Raw(unit, v));
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    const VI x = QuadOfRow(a[r] + at + 4 * Q);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) AddQuads(acc[r][v], w[v], x);
  }
}

// All quads of a unit.
template <class Unit, int MR>
struct UnitStepI8 {
  const std::byte* unit;
  const std::uint8_t* const (&a)[MR];
  int at;
  VI (&acc)[MR][kVectorsOfRows<MR>];
  template <int Q>
  HWY_INLINE void Do() const {
    StepI8<Unit, Q, MR>(unit, a, at, acc);
  }
};

// All quads of one vector of a unit's columns for one row whose codes are x, one behind the other.
struct ChainOfQuads {
  template <class Unit, std::size_t kQuads, std::size_t... Q>
  static HWY_INLINE VI Add(const typename Unit::Raw& raw, const VI (&x)[kQuads], VI acc,
                           std::index_sequence<Q...>) {
    (AddQuads(acc, Unit::template Quad<Q>(raw), x[Q]), ...);
    return acc;
  }
};

// Weights are read once.
template <class Unit, class Sums>
HWY_INLINE void UnitOfRowI8(const std::byte* unit, const std::uint8_t* a,
                            VI (&acc)[kVectorsOfRows<1>]) {
  constexpr int kQuads = Unit::kSteps / 4;
  VI x[kQuads];
  LoadQuadsOfRow(a, x);
#pragma GCC unroll 8
  for (int v = 0; v < kVectorsOfRows<1>; ++v) {
    acc[v] = Sums::template Add<Unit>(typename Unit::Raw(unit, v), x, acc[v],
                                      std::make_index_sequence<kQuads>{});
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_DOT8

#endif  // per-target include guard
