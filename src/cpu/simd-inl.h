// What every SIMD file of this folder begins with: Highway, short names for its tags, and which
// instructions the target has that is being compiled. Like all -inl.h files here it opens alone, and
// may be included once per target (Highway's toggle guard); everything is in an unnamed namespace of
// that target's own.
#if defined(MOESAIC_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_SIMD_INL_H_
#undef MOESAIC_CPU_SIMD_INL_H_
#else
#define MOESAIC_CPU_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "core/fault.h"
#include "cpu/kernels.h"
#include "hwy/highway.h"

// bf16 and 8-bit integer dot products, byte permutes: beyond what Highway's AVX3_DL promises, so the
// instruction set is pushed by hand. Lambdas do not inherit what is pushed around a file.
#undef MOESAIC_TIER_BF16
#undef MOESAIC_TIER_ATTR
#undef MOESAIC_BEFORE_NAMESPACE
#undef MOESAIC_TIER_TARGET_STR
#if defined(MOESAIC_TIER_AMX)  // tier_amx.cc
#define MOESAIC_TIER_TARGET_STR HWY_TARGET_STR ",avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8"
#else
#define MOESAIC_TIER_TARGET_STR HWY_TARGET_STR ",avx512bf16,avx512vnni"
#endif
#if HWY_TARGET == HWY_AVX3_DL
#define MOESAIC_TIER_BF16 1
#define MOESAIC_TIER_ATTR __attribute__((target(MOESAIC_TIER_TARGET_STR)))
#define MOESAIC_BEFORE_NAMESPACE() HWY_PUSH_ATTRIBUTES(MOESAIC_TIER_TARGET_STR)
#else
#define MOESAIC_TIER_BF16 0
#define MOESAIC_TIER_ATTR HWY_ATTR
#define MOESAIC_BEFORE_NAMESPACE() HWY_BEFORE_NAMESPACE()
#endif
// The 8-bit dot product alone: of machines that may have it without the rest (AVX-VNNI beside AVX2,
// AVX512_VNNI beside AVX-512, I8MM beside NEON). tiers.cc looks whether this one does. With
// MOESAIC_TIER_BYTE_PAIRS (tier_avx2_pairs.cc) two instructions of AVX2 in its place.
#undef MOESAIC_TIER_DOT8
#undef MOESAIC_BEFORE_DOT8
#undef MOESAIC_AFTER_DOT8
#if HWY_TARGET == HWY_AVX3_DL
#define MOESAIC_TIER_DOT8 1
#define MOESAIC_BEFORE_DOT8() MOESAIC_BEFORE_NAMESPACE()
#elif HWY_TARGET == HWY_AVX3
#define MOESAIC_TIER_DOT8 1
#define MOESAIC_BEFORE_DOT8() HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
#elif HWY_TARGET == HWY_AVX2 && defined(MOESAIC_TIER_BYTE_PAIRS)
#define MOESAIC_TIER_DOT8 1
#define MOESAIC_BEFORE_DOT8() MOESAIC_BEFORE_NAMESPACE()
#elif HWY_TARGET == HWY_AVX2
#define MOESAIC_TIER_DOT8 1
#define MOESAIC_BEFORE_DOT8() HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avxvnni")
#elif HWY_TARGET == HWY_NEON && defined(MOESAIC_TIER_NEON)  // tier_neon.cc; not the baseline there
#define MOESAIC_TIER_DOT8 1
#if HWY_COMPILER_CLANG  // spells features otherwise, and has no HWY_TARGET_STR here
#define MOESAIC_BEFORE_DOT8() HWY_PUSH_ATTRIBUTES("i8mm")
#else
#define MOESAIC_BEFORE_DOT8() HWY_PUSH_ATTRIBUTES("arch=armv8.2-a" HWY_TARGET_STR "+i8mm")
#endif
#else
#define MOESAIC_TIER_DOT8 0
#endif
#define MOESAIC_AFTER_DOT8() HWY_POP_ATTRIBUTES
#undef MOESAIC_AFTER_NAMESPACE
#define MOESAIC_AFTER_NAMESPACE() HWY_AFTER_NAMESPACE()

// F16 conversions (F16C) and fused multiply-adds: from AVX2 on, and on every 64-bit ARM.
#undef MOESAIC_TIER_F16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || \
    HWY_ARCH_ARM_A64
#define MOESAIC_TIER_F16 1
#else
#define MOESAIC_TIER_F16 0
#endif

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;
constexpr DF df;
constexpr hn::RebindToUnsigned<DF> du32;
constexpr hn::RebindToSigned<DF> di32;
using VF = hn::Vec<DF>;
constexpr int kLanes = static_cast<int>(HWY_LANES(float));
static_assert(kPanelColumns % kLanes == 0 && kLanes <= 16,
              "a strip of 16 columns is a whole number of vectors");

HWY_INLINE void PrefetchUnit(const std::byte* p) {
  for (int line = 0; line < 4; ++line) __builtin_prefetch(p + 64 * line);
}

// fp16 bits in the low half of each lane -> fp32. Highway's emulation knows no infinity and no NaN,
// so the baseline shifts the exponent by a multiplication (exact, subnormals included) and restores
// the special exponent.
HWY_INLINE VF F16BitsToF32(hn::Vec<decltype(du32)> half) {
#if MOESAIC_TIER_F16
  const hn::Rebind<std::uint16_t, DF> du16;
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df, hn::BitCast(df16, hn::TruncateTo(du16, half)));
#else
  const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(du32, 0x7FFFU)));
  const auto scaled = hn::BitCast(du32, hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 0x1p112F)));
  const auto special =
      hn::RebindMask(du32, hn::Gt(hn::BitCast(di32, magnitude), hn::Set(di32, 0x0F7FFFFF)));
  const auto bits = hn::Or(scaled, hn::IfThenElseZero(special, hn::Set(du32, 0x7F800000U)));
  return hn::BitCast(df, hn::Or(bits, hn::ShiftLeft<16>(hn::And(half, hn::Set(du32, 0x8000U)))));
#endif
}

// kLanes numbers of BF16 and of F16 as fp32.
HWY_INLINE VF LoadBF16(const std::uint16_t* p) {
  const hn::Rebind<std::uint16_t, DF> du16;
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, p))));
}
HWY_INLINE VF LoadF16(const std::uint16_t* p) {
#if MOESAIC_TIER_F16
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  const hn::Rebind<std::uint16_t, DF> du16;
  return F16BitsToF32(hn::PromoteTo(du32, hn::LoadU(du16, p)));
#endif
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
