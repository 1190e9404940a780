// Row quantisers of the formats other than e4m3 per 128 columns, compiled once per tier. Each
// equals, bit for bit, the scalar rules of experts/reference/operand.h on finite rows; a NaN or
// infinity makes the scale of its group (or row) so and reaches every product.
#if defined(MOESAIC_CPU_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_QUANTIZE_INL_H_
#undef MOESAIC_CPU_QUANTIZE_INL_H_
#else
#define MOESAIC_CPU_QUANTIZE_INL_H_
#endif

#include <bit>
#include <cstring>
#include <limits>

#include "cpu/rows-inl.h"
#include "quant/fp8_group.h"
#include "quant/fp8_scaled.h"
#include "quant/int_group.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// The value nearest to v on the grid of a small float with kMantissa explicit bits whose spacing
// ends at the smallest normal number: adding and taking away a number whose last place is the
// spacing around v leaves the rounding (ties to even) to the addition.
template <int kMantissa>
HWY_INLINE VF RoundToSmallFloat(VF v, float min_normal) {
  const VF power = hn::BitCast(df, hn::And(hn::BitCast(du32, v), hn::Set(du32, 0x7F800000U)));
  const VF magic = hn::Mul(hn::Max(power, hn::Set(df, min_normal)),
                           hn::Set(df, 1.5F * static_cast<float>(1 << (23 - kMantissa))));
  return hn::Sub(hn::Add(v, magic), magic);
}

// Value of the code nearest to v.
template <RowQuantRule kRule>
HWY_INLINE VF CodeValue(VF v) {
  constexpr bool kInt8 = kRule == RowQuantRule::kInt8;
  constexpr bool kFp4 = kRule == RowQuantRule::kMxfp4 || kRule == RowQuantRule::kNvfp4;
  constexpr float kTop = kInt8 ? 127.0F : kFp4 ? 6.0F : 448.0F;
  v = hn::Max(hn::Min(v, hn::Set(df, kTop)), hn::Set(df, kInt8 ? -128.0F : -kTop));
  if constexpr (kInt8) {
    const VF magic = hn::Set(df, 0x1.8p23F);
    return hn::Sub(hn::Add(v, magic), magic);
  } else if constexpr (kFp4) {
    return RoundToSmallFloat<1>(v, 1.0F);
  } else {
    return RoundToSmallFloat<3>(v, 0x1p-6F);
  }
}

// Largest magnitude, NaN above infinity.
HWY_INLINE float AbsMax(float* row, std::int64_t n) {
  auto top = hn::Zero(du32);
  ForRow(row, n, [&](VF v) MOESAIC_TIER_ATTR {
    top = hn::Max(top, hn::And(hn::BitCast(du32, v), hn::Set(du32, 0x7FFFFFFFU)));
    return v;
  });
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(du32, top)));
}

template <RowQuantRule kRule>
HWY_INLINE float ScaleOf(float amax) {
  switch (kRule) {
    case RowQuantRule::kMxfp8:
      return f32_from_e8m0(quant::mx_scale(amax, DType::kF8E4M3, ExponentRule::kCeil));
    case RowQuantRule::kMxfp4:
      return f32_from_e8m0(quant::mx_scale(amax, DType::kF4E2M1, ExponentRule::kRound175));
    case RowQuantRule::kInt8:
      return quant::int8_row_scale(amax);
    case RowQuantRule::kFp8Group:
      return quant::fp8_group_scale(amax, quant::ScaleRounding::kNone);
    case RowQuantRule::kFp8GroupPow2:
      return quant::fp8_group_scale(amax, quant::ScaleRounding::kCeilPowerOfTwo);
    default:  // kFp8Token
      return quant::fp8_row_scale(amax);
  }
}

// scales null: the values come out multiplied by them.
template <RowQuantRule kRule>
HWY_INLINE void QuantizeGroups(float* row, std::int64_t n, std::int64_t group, float static_scale,
                               float* scales) {
  constexpr bool kNvfp4 = kRule == RowQuantRule::kNvfp4;
  const float gscale = 1.0F / static_scale;
  if constexpr (kRule == RowQuantRule::kFp8Static) {
    const VF inverse = hn::Set(df, gscale);
    // No scale of a group holds its NaN.
    ForRow(row, n, [&](VF v) MOESAIC_TIER_ATTR {
      return hn::IfThenElse(hn::IsNaN(v), v, CodeValue<kRule>(hn::Mul(v, inverse)));
    });
    return;
  }
  float first = 0.0F;
  for (std::int64_t k0 = 0, g = 0; k0 < n; k0 += group, ++g) {
    float* x = row + k0;
    const std::int64_t count = HWY_MIN(group, n - k0);
    const float amax = AbsMax(x, count);
    const bool finite = amax <= std::numeric_limits<float>::max();
    float scale = amax;  // NaN or infinite
    if (finite && kNvfp4) scale = f32_from_e4m3(quant::nvfp4_block_scale(amax, gscale));
    if (finite && !kNvfp4) scale = ScaleOf<kRule>(amax);
    if (g == 0) first = scale;
    const float kept = MOESAIC_FAULT(cpu_row_scale_of_group_zero) ? first : scale;
    if (scales != nullptr) scales[g] = kept;
    // Byte 0 of either scale format stands for a group of zeros (or of nothing that a code could
    // hold).
    constexpr bool kMx = kRule == RowQuantRule::kMxfp8 || kRule == RowQuantRule::kMxfp4;
    if ((kMx && scale == 0x1p-127F) || (kNvfp4 && scale == 0.0F)) {
      std::memset(x, 0, static_cast<std::size_t>(count) * sizeof(float));
      continue;
    }
    const VF factor = hn::Set(df, kNvfp4 ? gscale / scale : scale);
    const VF times = hn::Set(df, scales == nullptr ? kept : 1.0F);
    ForRow(x, count, [&](VF v) MOESAIC_TIER_ATTR {
      return hn::Mul(CodeValue<kRule>(kNvfp4 ? hn::Mul(v, factor) : hn::Div(v, factor)), times);
    });
  }
}

void QuantizeRow(RowQuantRule rule, std::int64_t group, float static_scale, float* row,
                 std::int64_t n, float* scales) {
  switch (rule) {
    case RowQuantRule::kMxfp8:
      return QuantizeGroups<RowQuantRule::kMxfp8>(row, n, quant::kMxGroupSize, 1.0F, scales);
    case RowQuantRule::kMxfp4:
      return QuantizeGroups<RowQuantRule::kMxfp4>(row, n, quant::kMxGroupSize, 1.0F, scales);
    case RowQuantRule::kNvfp4:
      return QuantizeGroups<RowQuantRule::kNvfp4>(row, n, quant::kNvfp4GroupSize, static_scale,
                                                  scales);
    case RowQuantRule::kFp8Token:
      return QuantizeGroups<RowQuantRule::kFp8Token>(row, n, n, 1.0F, scales);
    case RowQuantRule::kFp8Static:
      return QuantizeGroups<RowQuantRule::kFp8Static>(row, n, n, static_scale, scales);
    case RowQuantRule::kInt8:
      return QuantizeGroups<RowQuantRule::kInt8>(row, n, n, 1.0F, scales);
    case RowQuantRule::kFp8Group:
      return QuantizeGroups<RowQuantRule::kFp8Group>(row, n, group, 1.0F, scales);
    case RowQuantRule::kFp8GroupPow2:
      return QuantizeGroups<RowQuantRule::kFp8GroupPow2>(row, n, group, 1.0F, scales);
    case RowQuantRule::kNone:
      return;
  }
}

// sums[g] of `step` elements each, lane by lane and then across lanes: a fixed order.
void GroupSums(const float* row, std::int64_t n, std::int64_t step, float* sums) {
  for (std::int64_t k0 = 0, g = 0; k0 < n; k0 += step, ++g) {
    const std::int64_t count = HWY_MIN(step, n - k0);
    VF sum = hn::Zero(df);
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sum = hn::Add(sum, hn::LoadU(df, row + k0 + i));
    float total = hn::GetLane(hn::SumOfLanes(df, sum));
    for (; i < count; ++i) total += row[k0 + i];
    sums[g] = total;
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
