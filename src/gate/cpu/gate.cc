#include "gate/cpu/gate.h"

#include <cstddef>
#include <cstring>

#include "core/fault.h"

// Highway compiles the part below once per SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gate/cpu/gate.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace moesaic {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DU16 = hn::Rebind<std::uint16_t, DF>;
using VF = hn::Vec<DF>;

// Readers of one vector of fp32 values from element `i` of a row. Integer decoding on purpose: all
// targets then agree on every code, NaN and subnormals included.
struct ReadF32 {
  using Element = float;
  static HWY_INLINE VF load(const float* p) { return hn::LoadU(DF(), p); }
};
struct ReadBF16 {
  using Element = std::uint16_t;
  static HWY_INLINE VF load(const std::uint16_t* p) {
    const auto code = hn::PromoteTo(DU(), hn::LoadU(DU16(), p));
    return hn::BitCast(DF(), hn::ShiftLeft<16>(code));
  }
};
struct ReadF16 {
  using Element = std::uint16_t;
  static HWY_INLINE VF load(const std::uint16_t* p) {
    const DF df;
    const DU du;
    const auto code = hn::PromoteTo(du, hn::LoadU(DU16(), p));
    const auto sign = hn::ShiftLeft<16>(hn::And(code, hn::Set(du, 0x8000U)));
    const auto magnitude = hn::ShiftLeft<13>(hn::And(code, hn::Set(du, 0x7FFFU)));
    // Reading the f16 fields as fp32 fields leaves the exponent too small by 127 - 15; the product
    // with 2^112 corrects it, for subnormals as well. An exponent field of all ones needs a patch.
    const auto scaled = hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 0x1p112F));
    const auto non_finite = hn::Eq(hn::And(code, hn::Set(du, 0x7C00U)), hn::Set(du, 0x7C00U));
    const auto patch = hn::IfThenElseZero(non_finite, hn::Set(du, 0x7F800000U));
    return hn::BitCast(df, hn::Or(hn::Or(hn::BitCast(du, scaled), patch), sign));
  }
};

// The last H mod lanes elements, padded with zeros: a vector load there could leave the row.
template <class Read>
HWY_INLINE VF load_tail(const typename Read::Element* p, std::size_t count) {
  HWY_ALIGN typename Read::Element padded[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(padded, p, count * sizeof(*p));
  return Read::load(padded);
}

// kRows x kExperts dot products at once; each vector of x and W that is loaded and widened then
// serves several of them. 4 x 4 accumulators fill half of AVX-512's registers and all of AVX2's;
// one accumulator per product keeps its order of additions independent of the tile.
template <class ReadX, class ReadW, int kRows, int kExperts>
HWY_INLINE void dot_tile(const std::byte* x, std::int64_t x_row_bytes, const std::byte* w,
                         std::int64_t hidden, float* out, std::int64_t out_stride) {
  const DF df;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(df));
  const typename ReadX::Element* xs[kRows];
  const typename ReadW::Element* ws[kExperts];
  for (int r = 0; r < kRows; ++r) {
    xs[r] = reinterpret_cast<const typename ReadX::Element*>(x + r * x_row_bytes);
  }
  for (int e = 0; e < kExperts; ++e) {
    ws[e] = reinterpret_cast<const typename ReadW::Element*>(w) + e * hidden;
  }
  VF acc[kRows][kExperts];
  for (int r = 0; r < kRows; ++r) {
    for (int e = 0; e < kExperts; ++e) acc[r][e] = hn::Zero(df);
  }
  std::int64_t i = 0;
  for (; i + lanes <= hidden; i += lanes) {
    VF wv[kExperts];
    for (int e = 0; e < kExperts; ++e) wv[e] = ReadW::load(ws[e] + i);
    for (int r = 0; r < kRows; ++r) {
      const VF xv = ReadX::load(xs[r] + i);
      for (int e = 0; e < kExperts; ++e) acc[r][e] = hn::MulAdd(xv, wv[e], acc[r][e]);
    }
  }
  if (i < hidden && !MOESAIC_FAULT(gate_drop_tail)) {
    const auto count = static_cast<std::size_t>(hidden - i);
    for (int r = 0; r < kRows; ++r) {
      const VF xv = load_tail<ReadX>(xs[r] + i, count);
      for (int e = 0; e < kExperts; ++e) {
        acc[r][e] = hn::MulAdd(xv, load_tail<ReadW>(ws[e] + i, count), acc[r][e]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int e = 0; e < kExperts; ++e) {
      out[r * out_stride + e] = hn::GetLane(hn::SumOfLanes(df, acc[r][e]));
    }
  }
}

template <class ReadX, class ReadW>
void rectangle(const GateOperands& op, std::int64_t t_begin, std::int64_t t_end,
               std::int64_t e_begin, std::int64_t e_end, float* logits, std::int64_t stride) {
  const std::int64_t h = op.hidden_size;
  const std::int64_t w_row_bytes = h * static_cast<std::int64_t>(sizeof(typename ReadW::Element));
  // Experts outermost: the four rows of W stay in the first caches while the tokens pass by.
  for (std::int64_t e = e_begin; e < e_end;) {
    const bool four_experts = e + 4 <= e_end;
    const std::byte* w = op.weight + e * w_row_bytes;
    for (std::int64_t t = t_begin; t < t_end;) {
      const bool four_rows = t + 4 <= t_end;
      const std::byte* x = op.x + t * op.x_row_bytes;
      float* out = logits + (t - t_begin) * stride + (e - e_begin);
      if (four_rows && four_experts) {
        dot_tile<ReadX, ReadW, 4, 4>(x, op.x_row_bytes, w, h, out, stride);
      } else if (four_rows) {
        dot_tile<ReadX, ReadW, 4, 1>(x, op.x_row_bytes, w, h, out, stride);
      } else if (four_experts) {
        dot_tile<ReadX, ReadW, 1, 4>(x, op.x_row_bytes, w, h, out, stride);
      } else {
        dot_tile<ReadX, ReadW, 1, 1>(x, op.x_row_bytes, w, h, out, stride);
      }
      t += four_rows ? 4 : 1;
    }
    e += four_experts ? 4 : 1;
  }
}

template <class ReadX>
void for_weight(const GateOperands& op, std::int64_t t_begin, std::int64_t t_end,
                std::int64_t e_begin, std::int64_t e_end, float* logits, std::int64_t stride) {
  const auto kernel = op.weight_dtype == DType::kF32    ? rectangle<ReadX, ReadF32>
                      : op.weight_dtype == DType::kBF16 ? rectangle<ReadX, ReadBF16>
                                                        : rectangle<ReadX, ReadF16>;
  kernel(op, t_begin, t_end, e_begin, e_end, logits, stride);
}

void gate_logits(const GateOperands& op, std::int64_t t_begin, std::int64_t t_end,
                 std::int64_t e_begin, std::int64_t e_end, float* logits, std::int64_t stride) {
  const auto kernel = op.x_dtype == DType::kF32    ? for_weight<ReadF32>
                      : op.x_dtype == DType::kBF16 ? for_weight<ReadBF16>
                                                   : for_weight<ReadF16>;
  kernel(op, t_begin, t_end, e_begin, e_end, logits, stride);
}

const char* gate_target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace moesaic
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moesaic {

HWY_EXPORT(gate_logits);
HWY_EXPORT(gate_target);

void cpu_gate_logits(const GateOperands& operands, std::int64_t t_begin, std::int64_t t_end,
                     std::int64_t e_begin, std::int64_t e_end, float* logits,
                     std::int64_t logits_stride) {
  HWY_DYNAMIC_DISPATCH(gate_logits)
  (operands, t_begin, t_end, e_begin, e_end, logits, logits_stride);
}

const char* cpu_gate_target() { return HWY_DYNAMIC_DISPATCH(gate_target)(); }

}  // namespace moesaic
#endif  // HWY_ONCE
