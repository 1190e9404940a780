// The integer sums of one group for the rows of a tile (panel_tile_i8-inl.h).
#if defined(MOESAIC_CPU_GROUP_SUMS_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_GROUP_SUMS_I8_INL_H_
#undef MOESAIC_CPU_GROUP_SUMS_I8_INL_H_
#else
#define MOESAIC_CPU_GROUP_SUMS_I8_INL_H_
#endif

#ifdef MOESAIC_TIER_BYTE_PAIRS
#include "cpu/group_sums_pairs_i8-inl.h"
#else
#include "cpu/group_steps_i8-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// What is made of a tile's rows once for all columns.
template <class Unit, int MR>
using I8TileRowsOf = RowsAsTheyLie<MR>;

// Group sums of some vectors of columns, which `unit` and the codes a begin; unit goes on to
// the next group. kLines of memory are asked for with each unit where `fetches`.
template <class Unit, int MR, int kLines>
HWY_INLINE void SumGroup(const std::byte*& unit, const I8TileRowsOf<Unit, MR>&, int /*group*/,
                         const std::uint8_t* const (&a)[MR], int steps, bool fetches,
                         const std::byte*& fetch, VI (&acc)[MR][kVectorsOfRows<MR>]) {
  StartGroup<Unit, MR>(a, acc);
  for (int k = 0; k < steps; k += Unit::kSteps, unit += Unit::kBytes) {
    if (fetches) FetchLines<kLines>(fetch);
    if constexpr (MR == 1) {
      UnitOfRowI8<Unit, ChainOfQuads>(unit, a[0] + k, acc[0]);
    } else {
      ForQuads<Unit>(UnitStepI8<Unit, MR>{unit, a, k, acc});
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_DOT8
#endif  // MOESAIC_TIER_BYTE_PAIRS

#endif  // per-target include guard
