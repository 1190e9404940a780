// Tier "amx": that of AVX-512 with the bf16 dot product, with products of bf16 and int8 on tile
// registers.
#define MOESAIC_TIER_AMX 1
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#define HWY_WANT_SSSE3 1
#define HWY_WANT_AVX3_DL 1
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tier_amx.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "cpu/tiers.h"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3_DL
#include "cpu/ceilings_tiles-inl.h"
#include "cpu/panel_gemm_tiles-inl.h"
#include "cpu/tiles_amx-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {
void UseTilesAmx(CpuKernels& t) {
  UseTiles<TilesAmx>(t);
  t.multiply_add_loop = MultiplyAddLoopTiles<TilesAmx>;
  t.multiply_add_loop_i8 = MultiplyAddLoopTilesI8<TilesAmx>;
}
}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

namespace moesaic::cpu {
const CpuKernels* kernels_amx() {
  static const CpuKernels table = [] {
    CpuKernels t = *kernels_avx512_bf16();
    t.name = "amx";
    HWY_NAMESPACE::UseTilesAmx(t);
    return t;
  }();
  return &table;
}
}  // namespace moesaic::cpu
#endif  // HWY_TARGET == HWY_AVX3_DL

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX3_DL) == 0
namespace moesaic::cpu {
const CpuKernels* kernels_amx() { return nullptr; }  // not a target of this build
}  // namespace moesaic::cpu
#endif
