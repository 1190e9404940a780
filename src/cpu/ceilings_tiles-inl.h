// Loops that measure the ceilings of tile products, in the form of multiply_add_loop (kernels.h).
#if defined(MOESAIC_CPU_CEILINGS_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_CEILINGS_TILES_INL_H_
#undef MOESAIC_CPU_CEILINGS_TILES_INL_H_
#else
#define MOESAIC_CPU_CEILINGS_TILES_INL_H_
#endif

#include "cpu/panel_sources_tiles-inl.h"
#include "cpu/tile_config.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Five chains of tiles of sums, from a row of their own each and back to it: all 16 rows of a tile
// are the same. A product takes 16 cycles and its result 52.
template <class Tiles, class Operand>
HWY_NOINLINE double TileLoop(std::int64_t iterations, void* operands) {
  TileConfig config;
  for (int tile = 0; tile < kTileRegisters; ++tile) config.set(tile, kTileRows, kTileBytes);
  Tiles::Configure(config);
  auto* const chains = static_cast<std::byte*>(operands);
  const std::byte* const constants = chains + kMaxMultiplyAddChains * kTileBytes;
  const std::int64_t apart = MOESAIC_FAULT(ceilings_equal_tiles) ? 0 : kTileBytes;
  Tiles::template Load<0>(chains, 0);
  Tiles::template Load<1>(chains + apart, 0);
  Tiles::template Load<2>(chains + 2 * apart, 0);
  Tiles::template Load<3>(chains + 3 * apart, 0);
  Tiles::template Load<4>(chains + 4 * apart, 0);
  Tiles::template Load<5>(constants, 0);
  Tiles::template Load<6>(constants + kTileBytes, 0);
  Tiles::template Load<7>(constants + 2 * kTileBytes, 0);
  for (std::int64_t n = 0; n < iterations; ++n) {
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
  return 5 * per_product * static_cast<double>(iterations);
}

// As many cycles as the loops of vectors take about, 24 chains of a half cycle an iteration.
constexpr std::int64_t kTileIterationCost = 8;

template <class Tiles>
double MultiplyAddLoopTiles(OperandKind operand, std::int64_t iterations, float* operands) {
  if (operand != OperandKind::kBF16)
    return kernels_avx512_bf16()->multiply_add_loop(operand, iterations, operands);
  // Operands are bf16 pairs, both of them the upper half of what is there.
  auto* words = reinterpret_cast<std::uint32_t*>(operands) + kMaxMultiplyAddChains * 16;
  for (int i = 0; i < 3 * 16; i += kLanes) {
    const auto high = hn::And(hn::LoadU(du32, words + i), hn::Set(du32, 0xFFFF0000U));
    hn::StoreU(hn::Or(high, hn::ShiftRight<16>(high)), du32, words + i);
  }
  return TileLoop<Tiles, TileBF16>(iterations / kTileIterationCost, operands);
}
template <class Tiles>
double MultiplyAddLoopTilesI8(std::int64_t iterations, std::int32_t* operands) {
  return TileLoop<Tiles, TileI8<0>>(iterations / kTileIterationCost, operands);
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
