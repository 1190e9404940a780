// Body of a tier file, which has defined MOESAIC_TIER, the tier's name, and MOESAIC_TIER_TARGET, the
// Highway target to compile the kernels for (0: the build's own). Not guarded: foreach_target
// includes it again for that target.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS                                                          \
  ((HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
    HWY_SVE2_128) &                                                                   \
   ~MOESAIC_TIER_TARGET)
#define HWY_WANT_SSSE3 1
#define HWY_WANT_AVX3_DL 1
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tier-inl.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "cpu/tiers.h"
#include "hwy/highway.h"

// The build's own target is the one that every build has; another tier's comes first.
#if MOESAIC_TIER_TARGET == 0
#define MOESAIC_TIER_IS_THIS (HWY_TARGET == HWY_STATIC_TARGET)
#else
#define MOESAIC_TIER_IS_THIS (HWY_TARGET == MOESAIC_TIER_TARGET)
#endif

#if MOESAIC_TIER_IS_THIS
#include "cpu/tier_integers-inl.h"
#ifndef MOESAIC_TIER_BYTE_PAIRS
#include "cpu/ceilings-inl.h"
#include "cpu/gate-inl.h"
#include "cpu/panel_gemm-inl.h"
#include "cpu/panel_gemm_bf16-inl.h"
#include "cpu/panel_gemm_e2m1-inl.h"
#include "cpu/panel_gemm_e4m3_bf16-inl.h"
#include "cpu/panel_gemm_grouped-inl.h"
#include "cpu/panel_gemm_grouped_bf16-inl.h"
#include "cpu/quantize-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/super_scales-inl.h"
#endif

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Functions that are not named here are missing from the tier.
constexpr CpuKernels MakeTable() {
  CpuKernels t{};
  t.name = HWY_STR(MOESAIC_TIER);
#if MOESAIC_TIER_DOT8
  SetIntegers(t);
#endif
#ifndef MOESAIC_TIER_BYTE_PAIRS
  t.narrow_operand = OperandKind::kF32;
  t.chunk_rows = 8192;
  t.rows_per_call = 96;

  using enum WeightKind;
  t.panel_gemm_f32[kF32] = PanelGemmF32<DecodeF32>;
  t.panel_gemm_f32[kBF16] = PanelGemmF32<DecodeBF16>;
  t.panel_gemm_f32[kF16] = PanelGemmF32<DecodeF16>;
  t.panel_gemm_f32[kE4M3] = PanelGemmF32E4M3;
  t.grouped_gemm_f32[kE4M3] = GroupedGemmF32<UnitE4M3>;
  t.grouped_gemm_f32[kCode4] = GroupedGemmF32<UnitCode4>;
  t.grouped_gemm_f32[kI8] = GroupedGemmF32<UnitI8>;
  t.grouped_gemm_f32[kI6] = GroupedGemmF32<UnitI6>;
  t.grouped_gemm_f32[kInt4Fp8] = GroupedGemmF32<UnitInt4Fp8>;
  t.expand_super_scales = ExpandSuperScales;
  t.super_scale_steps = 256;
  t.scale_result = ScaleResult;

  t.gate_logits = GateLogits;
  t.activate = Activate;
  t.load_row = LoadRow;
  t.round_row = RoundRow;
  t.scale_row = ScaleRow;
  t.quantize_row_e4m3 = QuantizeRowE4M3;
  t.quantize_row = QuantizeRow;
  t.group_sums = GroupSums;
  t.store_bf16 = StoreRowBF16;
  t.store_panel = StorePanel;
  t.accumulate_row = AccumulateRow;
  t.store_row = StoreRow;
  t.multiply_add_loop = MultiplyAddLoop;
  t.read_loop = ReadLoop;

#if MOESAIC_TIER_BF16
  t.narrow_operand = OperandKind::kBF16;
  t.panel_gemm_bf16[kBF16] = PanelGemmPairBF16;
  t.panel_gemm_bf16[kE4M3] = PanelGemmPairE4M3;
  t.grouped_gemm_bf16[kE4M3] = GroupedGemmPair<PairsE4M3>;
  t.grouped_gemm_bf16[kCode4] = GroupedGemmPair<PairsCode4>;
  t.grouped_gemm_bf16[kI8] = GroupedGemmPair<PairsI8>;
  t.grouped_gemm_bf16[kI6] = GroupedGemmPair<PairsI6>;
  t.grouped_gemm_bf16[kInt4Fp8] = GroupedGemmPair<PairsInt4Fp8>;
  t.grouped_gemm_e2m1 = GroupedGemmE2M1;
  t.store_e2m1 = StoreE2M1;
#endif
#endif  // MOESAIC_TIER_BYTE_PAIRS
  return t;
}
constexpr CpuKernels kTable = MakeTable();

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

namespace moesaic::cpu {
const CpuKernels* HWY_CONCAT(kernels_, MOESAIC_TIER)() { return &HWY_NAMESPACE::kTable; }
}  // namespace moesaic::cpu
#endif  // MOESAIC_TIER_IS_THIS
#undef MOESAIC_TIER_IS_THIS

#if HWY_ONCE && MOESAIC_TIER_TARGET != 0 && (HWY_TARGETS & MOESAIC_TIER_TARGET) == 0
namespace moesaic::cpu {
// Not a target of this build.
const CpuKernels* HWY_CONCAT(kernels_, MOESAIC_TIER)() { return nullptr; }
}  // namespace moesaic::cpu
#endif
