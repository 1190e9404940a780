// Tiles of rows over decoded groups of 16 steps: with a fold every eight dot products, the cost of
// loop ends and addresses is noticeable. The same as RunGroupedTile<PairsDecoded>
// (panel_gemm_grouped_bf16-inl.h), unrolled, for folds without row scales and offsets.
#if defined(MOESAIC_CPU_PANEL_TILE16_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_TILE16_BF16_INL_H_
#undef MOESAIC_CPU_PANEL_TILE16_BF16_INL_H_
#else
#define MOESAIC_CPU_PANEL_TILE16_BF16_INL_H_
#endif

#include "cpu/panel_gemm_bf16-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Decoded groups in L1.
struct GroupedBlock {
  std::uint32_t* w = nullptr;     // bf16 units
  const float* scales = nullptr;  // [groups][64]
  std::int64_t k0 = 0;            // first step
  std::int64_t group = 0;         // first group
  int groups = 0;
  int row = 0;
};

// A block's groups for MR rows.
template <int MR>
HWY_NOINLINE void RunTileOf16(const PanelArgs& args, const GroupedBlock& block) {
  const std::uint16_t* a[MR];
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const std::uint16_t*>(args.rows[block.row + r]) + block.k0;
  const auto* w = reinterpret_cast<const std::byte*>(block.w);
  const float* scales = block.scales;
  float* result = args.result + block.row * kPanelColumns;
  for (int group = 0; group < block.groups; ++group) {
    __asm__("" : "+r"(result));  // or an address for each of the 24 vectors is kept on the stack
    VF acc[MR][4];
    ClearTile<MR>(acc);
#pragma GCC unroll 8
    for (int k = 0; k < 16; k += 2) StepBF16<MR>(w + k / 2 * kUnitBytes, a, k, acc);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const VF scale = hn::LoadU(df, scales + 16 * v);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        float* p = result + r * kPanelColumns + 16 * v;
        hn::Store(hn::MulAdd(acc[r][v], scale, hn::Load(df, p)), df, p);
      }
    }
    w += 8 * kUnitBytes;
    scales += kPanelColumns;
    for (int r = 0; r < MR; ++r) a[r] += 16;
  }
}
using TileOf16Fn = void (*)(const PanelArgs&, const GroupedBlock&);
constexpr TileOf16Fn kTilesOf16[7] = {nullptr,        RunTileOf16<1>, RunTileOf16<2>,
                                      RunTileOf16<3>, RunTileOf16<4>, RunTileOf16<5>,
                                      RunTileOf16<6>};

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
