// Loops that measure ceilings: multiply-adds from registers, and reading memory. Called by
// cpu/ceilings.cc.
#if defined(MOESAIC_CPU_CEILINGS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_CEILINGS_INL_H_
#undef MOESAIC_CPU_CEILINGS_INL_H_
#else
#define MOESAIC_CPU_CEILINGS_INL_H_
#endif

#include "cpu/simd-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Chains start from values in memory and end there, every lane of them: a compiler can neither
// merge two (equal chains become one) nor drop a part. Tests count them in the machine code.
double MultiplyAddLoop(OperandKind operand, std::int64_t iterations, float* operands) {
  constexpr int kChains = multiply_add_chains(kLanes);
  const int stride = MOESAIC_FAULT(ceilings_equal_chains) ? 0 : 16;
  VF acc[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) acc[i] = hn::LoadU(df, operands + i * stride);
  const float* const constants = operands + kMaxMultiplyAddChains * 16;
  const VF x[2] = {hn::LoadU(df, constants), hn::LoadU(df, constants + 16)};
  const VF y = hn::LoadU(df, constants + 32);
#if MOESAIC_TIER_BF16
  if (operand == OperandKind::kBF16) {
    const auto pair = [](VF v) MOESAIC_TIER_ATTR {
      const auto high = hn::And(hn::BitCast(du32, v), hn::Set(du32, 0xFFFF0000U));
      return reinterpret_cast<__m512bh>(hn::Or(high, hn::ShiftRight<16>(high)).raw);
    };
    const __m512bh px[2] = {pair(x[0]), pair(x[1])};
    const __m512bh py = pair(y);
    for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) acc[i].raw = _mm512_dpbf16_ps(acc[i].raw, px[i % 2], py);
    }
  } else
#endif
  {
    static_cast<void>(operand);
    // The product within the chain: where there is no fused multiply-add, x * y would be made once.
    for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) acc[i] = hn::MulAdd(acc[i], x[i % 2], y);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) hn::StoreU(acc[i], df, operands + i * 16);
  const double per_lane = MOESAIC_TIER_BF16 && operand == OperandKind::kBF16 ? 4.0 : 2.0;
  return per_lane * kLanes * kChains * static_cast<double>(iterations);
}

std::uint32_t ReadLoop(const std::byte* data, std::int64_t bytes) {
  using VU = hn::Vec<decltype(du32)>;
  constexpr std::int64_t kVectors = 256 / (4 * kLanes);
  VU acc[kVectors];
#pragma GCC unroll 16
  for (std::int64_t v = 0; v < kVectors; ++v) acc[v] = hn::Zero(du32);
  for (std::int64_t at = 0; at < bytes; at += 256) {
    PrefetchUnit(data + at + 4096);
#pragma GCC unroll 16
    for (std::int64_t v = 0; v < kVectors; ++v) {
      acc[v] = hn::Xor(
          acc[v], hn::Load(du32, reinterpret_cast<const std::uint32_t*>(data + at) + v * kLanes));
    }
  }
#pragma GCC unroll 16
  for (std::int64_t v = 1; v < kVectors; ++v) acc[0] = hn::Xor(acc[0], acc[v]);
  // All lanes enter the sum: for one of them the compiler could load four bytes only.
  std::uint32_t lanes[16];
  hn::StoreU(acc[0], du32, lanes);
  std::uint32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum ^= lanes[i];
  return sum;
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
