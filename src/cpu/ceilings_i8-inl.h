// The loop that measures the ceiling of 8-bit integer products. Called by cpu/ceilings.cc.
#if defined(MOESAIC_CPU_CEILINGS_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_CEILINGS_I8_INL_H_
#undef MOESAIC_CPU_CEILINGS_I8_INL_H_
#else
#define MOESAIC_CPU_CEILINGS_I8_INL_H_
#endif

#include "cpu/quads_i8-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

HWY_INLINE void AddInLoop(VI& acc, VI x, VI y) {
#ifdef MOESAIC_TIER_BYTE_PAIRS
  VI pairs;  // every time anew
  __asm__ volatile("vpmaddubsw %2, %1, %0" : "=x"(pairs.raw) : "x"(x.raw), "x"(y.raw));
  acc.raw = _mm256_add_epi16(acc.raw, pairs.raw);
#else
  AddQuads(acc, x, y);
#endif
}

// As MultiplyAddLoop (ceilings-inl.h).
double MultiplyAddLoopI8(std::int64_t iterations, std::int32_t* operands) {
  constexpr int kChains = multiply_add_chains(kLanes);
  VI acc[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) acc[i] = hn::LoadU(di32, operands + i * 16);
  const std::int32_t* const constants = operands + kMaxMultiplyAddChains * 16;
  const VI x[2] = {hn::LoadU(di32, constants), hn::LoadU(di32, constants + 16)};
  const VI y = hn::LoadU(di32, constants + 32);
  for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) AddInLoop(acc[i], x[i % 2], y);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) hn::StoreU(acc[i], di32, operands + i * 16);
  return 8.0 * kLanes * kChains * static_cast<double>(iterations);
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif

#endif  // per-target include guard
