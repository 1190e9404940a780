#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#define HWY_WANT_SSSE3 1
#define HWY_WANT_AVX3_DL 1
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile_model_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "cpu/tile_model.h"
#include "cpu/tile_model_kernels.h"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3_DL
#include "cpu/ceilings_tiles-inl.h"
#include "cpu/panel_gemm_tiles-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {
void UseTilesModel(CpuKernels& t) {
  UseTiles<TilesModel>(t);
  t.multiply_add_loop = MultiplyAddLoopTiles<TilesModel>;
  t.multiply_add_loop_i8 = MultiplyAddLoopTilesI8<TilesModel>;
}
}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

namespace moesaic::cpu {
const CpuKernels* kernels_amx_model() {
  static CpuKernels table;
  static const bool there = [] {
    const auto base = kernels_by_name("avx512_bf16");
    if (!base.ok()) return false;
    table = **base;
    table.name = "amx_model";
    HWY_NAMESPACE::UseTilesModel(table);
    return true;
  }();
  return there ? &table : nullptr;
}
}  // namespace moesaic::cpu
#endif  // HWY_TARGET == HWY_AVX3_DL

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX3_DL) == 0
namespace moesaic::cpu {
const CpuKernels* kernels_amx_model() { return nullptr; }  // not a target of this build
}  // namespace moesaic::cpu
#endif
