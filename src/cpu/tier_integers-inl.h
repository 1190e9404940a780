// The integer kernels of a tier's table.
#if defined(MOESAIC_CPU_TIER_INTEGERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_TIER_INTEGERS_INL_H_
#undef MOESAIC_CPU_TIER_INTEGERS_INL_H_
#else
#define MOESAIC_CPU_TIER_INTEGERS_INL_H_
#endif

#include "cpu/ceilings_i8-inl.h"
#include "cpu/panel_gemm_i8-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

constexpr void SetIntegers(CpuKernels& t) {
  using enum WeightKind;
  t.grouped_gemm_i8[kI8Quads] = GroupedGemmI8<UnitQuads8>;
  t.grouped_gemm_i8[kI6Quads] = GroupedGemmI8<UnitQuads6>;
  t.grouped_gemm_i8[kI4Quads] = GroupedGemmI8<UnitQuads4>;
  t.grouped_gemm_i8[kE2M1Quads] = GroupedGemmI8<UnitQuadsE2M1>;
  t.super_gemm_i8[kI6Quads] = SuperGemmI8<UnitQuads6, I8ScalesSuper<8, false>>;
  t.super_gemm_i8[kI4Quads] = SuperGemmI8<UnitQuads4, I8ScalesSuper<6, true>>;
  t.store_i8 = StoreI8;
  t.multiply_add_loop_i8 = MultiplyAddLoopI8;
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_DOT8

#endif  // per-target include guard
