// Row conversions, quantisation, activation and reduction, compiled once per tier.
#if defined(MOESAIC_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_ROWS_INL_H_
#undef MOESAIC_CPU_ROWS_INL_H_
#else
#define MOESAIC_CPU_ROWS_INL_H_
#endif

#include <bit>
#include <cstring>
#include <limits>

#include "cpu/simd-inl.h"
#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "numerics/codec.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Nearest-even bf16 as an fp32 value; NaN stays NaN (quiet).
HWY_INLINE VF RoundToBF16(VF v) {
  const auto bits = hn::BitCast(du32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7FFFU)));
  const auto quiet = hn::Or(bits, hn::Set(du32, 0x00400000U));
  const auto chosen = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(v)), quiet, rounded);
  return hn::BitCast(df, hn::And(chosen, hn::Set(du32, 0xFFFF0000U)));
}

// The conversion instruction where the tier has one; Highway's emulation elsewhere truncates, so
// the baseline goes through the scalar codec.
HWY_INLINE VF RoundToF16(VF v) {
#if MOESAIC_TIER_F16
  const hn::Rebind<hwy::float16_t, DF> df16;
  return hn::PromoteTo(df, hn::DemoteTo(df16, v));
#else
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, df, lanes);
  for (float& x : lanes) x = f32_from_f16(f16_from_f32(x));
  return hn::Load(df, lanes);
#endif
}

HWY_INLINE void StoreBF16(VF exact, std::uint16_t* dst) {
  const hn::Rebind<std::uint16_t, DF> du16;
  hn::StoreU(hn::TruncateTo(du16, hn::ShiftRight<16>(hn::BitCast(du32, exact))), du16, dst);
}

// Loops over whole vectors and passes the tail through a zero-padded buffer, so that every element
// meets the same code.
template <class F>
HWY_INLINE void ForRow(float* row, std::int64_t n, F&& f) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(f(hn::LoadU(df, row + i)), df, row + i);
  if (i < n) {
    HWY_ALIGN float tail[kLanes] = {};
    std::memcpy(tail, row + i, static_cast<std::size_t>(n - i) * sizeof(float));
    hn::Store(f(hn::Load(df, tail)), df, tail);
    std::memcpy(row + i, tail, static_cast<std::size_t>(n - i) * sizeof(float));
  }
}

void LoadRow(const void* src, DType dtype, std::int64_t n, std::int64_t padded_n, float* dst) {
  std::int64_t i = 0;
  if (dtype == DType::kF32) {
    std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    i = n;
  } else {
    const auto* half = static_cast<const std::uint16_t*>(src);
    for (; i + kLanes <= n; i += kLanes) {
      hn::StoreU(dtype == DType::kBF16 ? LoadBF16(half + i) : LoadF16(half + i), df, dst + i);
    }
    for (; i < n; ++i)
      dst[i] = dtype == DType::kBF16 ? f32_from_bf16(half[i]) : f32_from_f16(half[i]);
  }
  for (; i < padded_n; ++i) dst[i] = 0.0F;
}

void RoundRow(float* row, std::int64_t n, DType dtype) {
  if (dtype == DType::kBF16) {
    ForRow(row, n, [](VF v) MOESAIC_TIER_ATTR { return RoundToBF16(v); });
  } else if (dtype == DType::kF16) {
    ForRow(row, n, [](VF v) MOESAIC_TIER_ATTR { return RoundToF16(v); });
  }
}

void ScaleRow(float* row, std::int64_t n, float factor) {
  const VF f = hn::Set(df, factor);
  ForRow(row, n, [f](VF v) MOESAIC_TIER_ATTR { return hn::Mul(v, f); });
}

// Value of the e4m3 code nearest to v (ties to even code), |v| <= 448: adding and taking away a
// number whose last place is the spacing of the codes around v (an eighth of v's power of two, at
// least 2^-9) leaves the rounding to the addition.
HWY_INLINE VF RoundToE4M3(VF v) {
  const VF power = hn::BitCast(df, hn::And(hn::BitCast(du32, v), hn::Set(du32, 0x7F800000U)));
  const VF magic = hn::Mul(hn::Max(power, hn::Set(df, 0x1p-6F)), hn::Set(df, 0x1.8p20F));
  return hn::Sub(hn::Add(v, magic), magic);
}

template <DType kRound>
HWY_INLINE VF RoundTo(VF v) {
  if constexpr (kRound == DType::kBF16) {
    return RoundToBF16(v);
  } else if constexpr (kRound == DType::kF16) {
    return RoundToF16(v);
  } else {
    return v;
  }
}

// max(absmax, 1e-10) / 448, or that up to the next power of two (at least 1e-10).
HWY_INLINE float ScaleE4M3(float absmax, bool power_of_two) {
  const float scale = (absmax < 1e-10F ? 1e-10F : absmax) / 448.0F;
  if (!power_of_two || !(scale <= std::numeric_limits<float>::max())) return scale;
  // Add to the mantissa, drop what is left of it.
  const auto bits = std::bit_cast<std::uint32_t>(scale < 1e-10F ? 1e-10F : scale);
  return std::bit_cast<float>((bits + 0x7FFFFFU) & 0xFF800000U);
}

// The tier's narrow operand: bf16 for the bf16 dot product, else fp32.
HWY_INLINE void StoreNarrow(VF exact, std::byte* dst, std::int64_t i) {
#if MOESAIC_TIER_BF16
  StoreBF16(exact, reinterpret_cast<std::uint16_t*>(dst) + i);
#else
  hn::StoreU(exact, df, reinterpret_cast<float*>(dst) + i);
#endif
}
constexpr std::int64_t kNarrowBytes = MOESAIC_TIER_BF16 ? 2 : 4;

// v / s by bits, for |v| <= 448 * s or so and a finite s >= 2^-43: r = 1 / s is correctly rounded,
// q1 within an ulp of the quotient, and then the last step rounds as a division does (Markstein
// 1990). Where v is so small that a remainder underflows, both quotients are far below half the
// least e4m3 number. Half the time of the division.
HWY_INLINE VF Quotient(VF v, VF s, VF r) {
#if MOESAIC_TIER_F16  // these tiers have fused multiply-adds too
  const VF q0 = hn::Mul(v, r);
  const VF q1 = hn::MulAdd(hn::NegMulAdd(q0, s, v), r, q0);
  return hn::MulAdd(hn::NegMulAdd(q1, s, v), r, q1);
#else
  static_cast<void>(r);
  return hn::Div(v, s);
#endif
}

// One group of 128 in one pass over memory: the values wait in registers (where there are enough)
// for their scale.
template <DType kRound>
HWY_INLINE float QuantizeGroupE4M3(const float* x, bool power_of_two, std::byte* dst) {
  constexpr int kVectors = kGroup / kLanes;
  VF v[kVectors];
  // As integers, magnitudes order like the floats they are, and NaN lies above infinity: a NaN in
  // the group becomes the maximum, hence the scale, and reaches every product of the group instead
  // of turning into a finite code.
  auto top = hn::Zero(du32);
#pragma GCC unroll 32
  for (int i = 0; i < kVectors; ++i) {
    v[i] = RoundTo<kRound>(hn::LoadU(df, x + i * kLanes));
    top = hn::Max(top, hn::And(hn::BitCast(du32, v[i]), hn::Set(du32, 0x7FFFFFFFU)));
  }
  const float scale =
      ScaleE4M3(std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(du32, top))), power_of_two);
  const VF s = hn::Set(df, scale);
  const VF r = hn::Set(df, 1.0F / scale);
  const VF limit = hn::Set(df, 448.0F);
  const bool finite = scale <= std::numeric_limits<float>::max();
#pragma GCC unroll 32
  for (int i = 0; i < kVectors; ++i) {
    const VF y = HWY_LIKELY(finite) ? Quotient(v[i], s, r) : hn::Div(v[i], s);
    StoreNarrow(RoundToE4M3(hn::Max(hn::Min(y, limit), hn::Neg(limit))), dst, i * kLanes);
  }
  return scale;
}

template <DType kRound>
void QuantizeRowRounded(const float* row, std::int64_t n, bool power_of_two, float* scales,
                        std::byte* dst) {
  for (std::int64_t k0 = 0, g = 0; k0 < n; k0 += kGroup, ++g) {
    const std::int64_t count = HWY_MIN(std::int64_t{kGroup}, n - k0);
    float scale;
    if (count == kGroup) {
      scale = QuantizeGroupE4M3<kRound>(row + k0, power_of_two, dst + k0 * kNarrowBytes);
    } else {
      HWY_ALIGN float tail[kGroup] = {};
      HWY_ALIGN std::byte codes[kGroup * kNarrowBytes];
      std::memcpy(tail, row + k0, static_cast<std::size_t>(count) * sizeof(float));
      scale = QuantizeGroupE4M3<kRound>(tail, power_of_two, codes);
      std::memcpy(dst + k0 * kNarrowBytes, codes, static_cast<std::size_t>(count * kNarrowBytes));
    }
    scales[g] = MOESAIC_FAULT(cpu_activation_scale_of_group_zero) && g > 0 ? scales[0] : scale;
  }
}

void QuantizeRowE4M3(const float* row, std::int64_t n, DType round_dtype, bool power_of_two,
                     float* scales, void* dst) {
  auto* out = static_cast<std::byte*>(dst);
  switch (round_dtype) {
    case DType::kBF16:
      return QuantizeRowRounded<DType::kBF16>(row, n, power_of_two, scales, out);
    case DType::kF16:
      return QuantizeRowRounded<DType::kF16>(row, n, power_of_two, scales, out);
    default:
      return QuantizeRowRounded<DType::kF32>(row, n, power_of_two, scales, out);
  }
}

void StoreRowBF16(const float* row, std::int64_t n, std::uint16_t* dst) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreBF16(hn::LoadU(df, row + i), dst + i);
  for (; i < n; ++i) dst[i] = bf16_from_f32(row[i]);
}

void StorePanel(const float* result, int num_rows, bool past_caches, float* out,
                std::int64_t stride) {
  for (int r = 0; r < num_rows; ++r, result += kPanelColumns, out += stride) {
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const VF x = hn::Load(df, result + c);
      if (past_caches) {
        hn::Stream(x, df, out + c);
      } else {
        hn::Store(x, df, out + c);
      }
    }
  }
  if (past_caches) hwy::FlushStream();  // before another thread may read it
}

void AccumulateRow(const float* src, float weight, std::int64_t n, float* dst) {
  const VF w = hn::Set(df, weight);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(df, src + i), w, hn::LoadU(df, dst + i)), df, dst + i);
  }
  if (i < n) {
    HWY_ALIGN float s[kLanes] = {};
    HWY_ALIGN float d[kLanes] = {};
    const std::size_t bytes = static_cast<std::size_t>(n - i) * sizeof(float);
    std::memcpy(s, src + i, bytes);
    std::memcpy(d, dst + i, bytes);
    hn::Store(hn::MulAdd(hn::Load(df, s), w, hn::Load(df, d)), df, d);
    std::memcpy(dst + i, d, bytes);
  }
}

void StoreRow(const float* row, std::int64_t n, DType dtype, void* dst) {
  if (dtype == DType::kF32) {
    std::memcpy(dst, row, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  auto* half = static_cast<std::uint16_t*>(dst);
  std::int64_t i = 0;
  if (dtype == DType::kBF16) {
    for (; i + kLanes <= n; i += kLanes) StoreBF16(RoundToBF16(hn::LoadU(df, row + i)), half + i);
  }
#if MOESAIC_TIER_F16
  if (dtype == DType::kF16) {
    const hn::Rebind<std::uint16_t, DF> du16;
    const hn::Rebind<hwy::float16_t, DF> df16;
    for (; i + kLanes <= n; i += kLanes) {
      hn::StoreU(hn::BitCast(du16, hn::DemoteTo(df16, hn::LoadU(df, row + i))), du16, half + i);
    }
  }
#endif
  for (; i < n; ++i) half[i] = dtype == DType::kBF16 ? bf16_from_f32(row[i]) : f16_from_f32(row[i]);
}

// 1 / (1 + exp(-x)); beyond the clamp the result is 0 or 1 either way, a NaN survives because every
// use multiplies by x.
HWY_INLINE VF Sigmoid(VF x) {
  const VF t = hn::Min(hn::Max(hn::Neg(x), hn::Set(df, -87.0F)), hn::Set(df, 104.0F));
  return hn::Div(hn::Set(df, 1.0F), hn::Add(hn::Set(df, 1.0F), hn::Exp(df, t)));
}

// Comparisons, not min/max: those drop a NaN.
HWY_INLINE VF ClampAbove(VF v, VF limit) { return hn::IfThenElse(hn::Gt(v, limit), limit, v); }
HWY_INLINE VF ClampBoth(VF v, VF limit) {
  const VF low = hn::Neg(limit);
  return hn::IfThenElse(hn::Lt(v, low), low, ClampAbove(v, limit));
}

HWY_INLINE VF GatedActivation(const ActivationSpec& spec, VF g, VF u) {
  const VF limit = hn::Set(df, spec.limit);
  if (spec.kind == ActivationKind::kSwigluStep) {
    return hn::Mul(ClampAbove(hn::Mul(g, Sigmoid(g)), limit), ClampBoth(u, limit));
  }
  // silu is the member alpha 1, beta 0 of the swigluoai family.
  g = ClampAbove(g, limit);
  u = hn::Add(ClampBoth(u, limit), hn::Set(df, spec.beta));
  return hn::Mul(hn::Mul(g, Sigmoid(hn::Mul(g, hn::Set(df, spec.alpha)))), u);
}

bool HasVectorActivation(ActivationKind kind) {
  return kind == ActivationKind::kSilu || kind == ActivationKind::kSwigluOai ||
         kind == ActivationKind::kSwigluStep;
}

void Activate(const ActivateArgs& args) {
  const bool gated = is_gated(args.activation.kind);
  const int width = gated ? kPanelColumns / 2 : kPanelColumns;
  ActivationSpec spec = args.activation;
  if (spec.kind == ActivationKind::kSilu) spec.alpha = 1.0F, spec.beta = 0.0F;
  HWY_ALIGN float row[kPanelColumns];
  for (int r = 0; r < args.num_rows; ++r) {
    const float* c = args.c + static_cast<std::int64_t>(r) * kPanelColumns;
    for (int i = 0; i < kPanelColumns; i += kLanes) {
      const VF v = hn::Load(df, c + i);
      hn::Store(args.bias != nullptr ? hn::Add(v, hn::LoadU(df, args.bias + i)) : v, df, row + i);
    }
    float* out = args.out + r * args.out_stride;
    if (HasVectorActivation(spec.kind)) {
      for (int i = 0; i < width; i += kLanes) {
        hn::StoreU(GatedActivation(spec, hn::Load(df, row + i), hn::Load(df, row + width + i)), df,
                   out + i);
      }
    } else {
      args.scalar_activation(spec, gated ? GateUpLayout::kGateThenUp : GateUpLayout::kNonGated, row,
                             out, width);
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
