// Loops that measure the ceilings of tile products, in the form of multiply_add_loop (kernels.h).
#if defined(MOESAIC_CPU_CEILINGS_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_CEILINGS_TILES_INL_H_
#undef MOESAIC_CPU_CEILINGS_TILES_INL_H_
#else
#define MOESAIC_CPU_CEILINGS_TILES_INL_H_
#endif

#include "cpu/panel_sources_tiles-inl.h"
#include "cpu/tiers.h"
#include "cpu/tile_config.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Chains of tiles of sums. A product takes 16 cycles and its result 52.
constexpr int kTileChains = 5;
// As many cycles as the loops of vectors take about, with 24 chains of half a cycle an iteration.
constexpr std::int64_t kTileIterationCost = 8;

// Each chain starts from a row of its own and ends in it: all 16 rows of a tile are the same.
// constants: x0, x1 and y.
template <class Tiles, class Operand>
HWY_INLINE double TileLoop(std::int64_t iterations, const void* constants, void* operands) {
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) config.set(tile, kTileRows, kTileBytes);
  Tiles::Configure(config);
  auto* const chains = static_cast<std::byte*>(operands);
  const auto* const factors = static_cast<const std::byte*>(constants);
  const std::int64_t apart = MOESAIC_FAULT(ceilings_equal_tiles) ? 0 : kTileBytes;
  Tiles::template Load<0>(chains, 0);
  Tiles::template Load<1>(chains + apart, 0);
  Tiles::template Load<2>(chains + 2 * apart, 0);
  Tiles::template Load<3>(chains + 3 * apart, 0);
  Tiles::template Load<4>(chains + 4 * apart, 0);
  Tiles::template Load<5>(factors, 0);
  Tiles::template Load<6>(factors + kTileBytes, 0);
  Tiles::template Load<7>(factors + 2 * kTileBytes, 0);
  const std::int64_t turns = iterations / kTileIterationCost;
  for (std::int64_t n = 0; n < turns; ++n) {
    Operand::template Dot<Tiles, 0, 5, 7>();
    Operand::template Dot<Tiles, 1, 6, 7>();
    Operand::template Dot<Tiles, 2, 5, 7>();
    Operand::template Dot<Tiles, 3, 6, 7>();
    Operand::template Dot<Tiles, 4, 5, 7>();
  }
  Tiles::template Store<0>(chains, 0);
  Tiles::template Store<1>(chains + kTileBytes, 0);
  Tiles::template Store<2>(chains + 2 * kTileBytes, 0);
  Tiles::template Store<3>(chains + 3 * kTileBytes, 0);
  Tiles::template Store<4>(chains + 4 * kTileBytes, 0);
  Tiles::Release();
  const double per_product = 2.0 * kTileRows * 16 * (kTileBytes / Operand::kStepBytes);
  return kTileChains * per_product * static_cast<double>(turns);
}

template <class Tiles>
double MultiplyAddLoopTiles(OperandKind operand, std::int64_t iterations, float* operands) {
  if (operand != OperandKind::kBF16)
    return kernels_avx512_bf16()->multiply_add_loop(operand, iterations, operands);
  // Factors are bf16 pairs, both of them the upper half of what is there.
  alignas(64) std::uint32_t pairs[3 * 16];
  const float* const constants = operands + kMaxMultiplyAddChains * 16;
  for (int i = 0; i < 3 * 16; i += kLanes) {
    const auto high =
        hn::And(hn::BitCast(du32, hn::LoadU(df, constants + i)), hn::Set(du32, 0xFFFF0000U));
    hn::Store(hn::Or(high, hn::ShiftRight<16>(high)), du32, pairs + i);
  }
  return TileLoop<Tiles, TileBF16>(iterations, pairs, operands);
}
template <class Tiles>
double MultiplyAddLoopTilesI8(std::int64_t iterations, std::int32_t* operands) {
  return TileLoop<Tiles, TileI8>(iterations, operands + kMaxMultiplyAddChains * 16, operands);
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
