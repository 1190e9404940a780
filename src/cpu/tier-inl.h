// Body of a tier file: aliases, mechanisms, and the tier's table. Included inside HWY_NAMESPACE of
// the one target that the tier file compiles; MOESAIC_TIER_BF16 adds the bf16 dot-product kernels.

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;
constexpr DF df;
constexpr hn::RebindToUnsigned<DF> du32;
constexpr hn::RebindToSigned<DF> di32;
using VF = hn::Vec<DF>;
constexpr int kLanes = static_cast<int>(HWY_LANES(float));
static_assert(kPanelColumns % kLanes == 0 && kLanes <= 16,
              "a strip of 16 columns is a whole number of vectors");

// Lambdas do not inherit the instruction set that is pushed around this file.
#if MOESAIC_TIER_BF16
#define MOESAIC_TIER_ATTR __attribute__((target(HWY_TARGET_STR ",avx512bf16,avx512vnni")))
#else
#define MOESAIC_TIER_ATTR HWY_ATTR
#endif

#include "cpu/rows-inl.h"
// On top of those:
#include "cpu/quantize-inl.h"

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
  // Every lane counts: of one alone, loads of four bytes would do.
  std::uint32_t lanes[16];
  hn::StoreU(acc[0], du32, lanes);
  std::uint32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum ^= lanes[i];
  return sum;
}

#if MOESAIC_TIER_BF16
struct BytesE4M3 {
  alignas(64) std::uint8_t high[128];
  alignas(64) std::uint8_t low[128];
};
// bf16 of code c is exact: 4 significant bits, exponents -9..8.
constexpr BytesE4M3 MakeBytesE4M3() {
  BytesE4M3 t{};
  for (unsigned code = 0; code < 128; ++code) {
    unsigned exponent = code >> 3, mantissa = code & 7U;
    unsigned bits = 0;
    if (code == 127) {
      bits = 0x7FC0;  // NaN
    } else if (exponent > 0) {
      bits = ((exponent + 120U) << 7) | (mantissa << 4);
    } else if (mantissa > 0) {  // m * 2^-9 = 1.x * 2^(shift - 9)
      unsigned shift = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
      bits = ((127U - 9U + shift) << 7) | (((mantissa << (3 - shift)) & 7U) << 4);
    }
    t.high[code] = static_cast<std::uint8_t>(bits >> 8);
    t.low[code] = static_cast<std::uint8_t>(bits & 0xFFU);
  }
  return t;
}
constexpr BytesE4M3 kE4M3ToBF16 = MakeBytesE4M3();
struct TablesE4M3;
HWY_INLINE void DecodeColumnsE4M3(const std::byte* w, std::uint32_t* pair01, std::uint32_t* pair23);
#include "cpu/panel_gemm-inl.h"
#include "cpu/panel_gemm_bf16-inl.h"
#include "cpu/panel_gemm_e4m3_bf16-inl.h"
#include "cpu/panel_gemm_grouped-inl.h"
#include "cpu/panel_gemm_grouped_bf16-inl.h"
// On top of those:
#include "cpu/panel_gemm_e2m1-inl.h"
HWY_INLINE void DecodeColumnsE4M3(const std::byte* w, std::uint32_t* pair01,
                                  std::uint32_t* pair23) {
  __m512i low, high;
  DecodePairs(LoadTablesE4M3(), _mm512_load_si512(w), low, high);
  _mm512_store_si512(pair01, low);
  _mm512_store_si512(pair23, high);
}
#else
HWY_INLINE void DecodeColumnsE4M3(const std::byte* w, std::uint32_t* pair01, std::uint32_t* pair23);
#include "cpu/panel_gemm-inl.h"
#include "cpu/panel_gemm_grouped-inl.h"
HWY_INLINE void DecodeColumnsE4M3(const std::byte* w, std::uint32_t* pair01,
                                  std::uint32_t* pair23) {
  const auto pack = [](VF even, VF odd) {
    return hn::Or(hn::ShiftRight<16>(hn::BitCast(du32, even)),
                  hn::BitCast(du32, odd));  // odd has zero low half
  };
  hn::Store(pack(DecodeE4M3::Step<0>(w), DecodeE4M3::Step<1>(w)), du32, pair01);
  hn::Store(pack(DecodeE4M3::Step<2>(w), DecodeE4M3::Step<3>(w)), du32, pair23);
}
#endif

constexpr CpuKernels kTable = {
    MOESAIC_TIER_NAME,
    MOESAIC_TIER_BF16 ? OperandKind::kBF16 : OperandKind::kF32,
    {PanelGemmF32<DecodeF32>, PanelGemmF32<DecodeBF16>, PanelGemmF32<DecodeF16>, PanelGemmF32E4M3,
     nullptr, nullptr, nullptr},
#if MOESAIC_TIER_BF16
    {nullptr, PanelGemmPairBF16, nullptr, PanelGemmPairE4M3, nullptr, nullptr, nullptr},
#else
    {},
#endif
    {nullptr, nullptr, nullptr, GroupedGemmF32<UnitE4M3>, GroupedGemmF32<UnitCode4>,
     GroupedGemmF32<UnitI8>, GroupedGemmF32<UnitInt4Fp8>},
#if MOESAIC_TIER_BF16
    {nullptr, nullptr, nullptr, GroupedGemmPair<PairsE4M3>, GroupedGemmPair<PairsCode4>,
     GroupedGemmPair<PairsI8>, GroupedGemmPair<PairsInt4Fp8>},
    GroupedGemmE2M1,
#else
    {},
    nullptr,
#endif
    ScaleResult,
    Activate,
    LoadRow,
    RoundRow,
    ScaleRow,
    QuantizeRowE4M3,
    QuantizeRow,
    GroupSums,
    StoreRowBF16,
#if MOESAIC_TIER_BF16
    StoreE2M1,
#else
    nullptr,
#endif
    AccumulateRow,
    StoreRow,
    MultiplyAddLoop,
    ReadLoop,
};
