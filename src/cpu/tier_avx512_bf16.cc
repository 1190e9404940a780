// Tier "avx512_bf16": the shared kernels compiled for one instruction set.
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_AVX2 | HWY_AVX3)
#define HWY_WANT_SSSE3 1
#define HWY_WANT_AVX3_DL 1
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/fault.h"
#include "cpu/kernels.h"
#include "cpu/tiers.h"
#include "numerics/codec.h"
#include "quant/fp8_group.h"
#include "quant/fp8_scaled.h"
#include "quant/int_group.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tier_avx512_bf16.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

#undef MOESAIC_TIER_NAME
#undef MOESAIC_TIER_BF16
#undef MOESAIC_TIER_F16
#define MOESAIC_TIER_NAME "avx512_bf16"
#define MOESAIC_TIER_F16 1
#define MOESAIC_TIER_BF16 1
#if HWY_TARGET == HWY_AVX3_DL
HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16,avx512vnni")
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {
#include "cpu/tier-inl.h"
}  // namespace
const CpuKernels* Kernels() { return &kTable; }
}  // namespace moesaic::cpu::HWY_NAMESPACE
HWY_POP_ATTRIBUTES
#endif

#if HWY_ONCE
namespace moesaic::cpu {
const CpuKernels* kernels_avx512_bf16() {
#if HWY_TARGETS & HWY_AVX3_DL
  return N_AVX3_DL::Kernels();
#else
  return nullptr;  // not an x86 build
#endif
}
}  // namespace moesaic::cpu
#endif
