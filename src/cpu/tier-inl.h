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

#include "cpu/rows-inl.h"

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
    {PanelGemmF32<DecodeF32>, PanelGemmF32<DecodeBF16>, PanelGemmF32<DecodeF16>, PanelGemmF32E4M3},
#if MOESAIC_TIER_BF16
    {nullptr, PanelGemmPairBF16, nullptr, PanelGemmPairE4M3},
#else
    {nullptr, nullptr, nullptr, nullptr},
#endif
    Activate,
    LoadRow,
    RoundRow,
    ScaleRow,
    QuantizeRowE4M3,
    StoreRowBF16,
    AccumulateRow,
    StoreRow,
};
