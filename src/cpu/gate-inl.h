// The gate's dot products: fp32, four rows of x by four of W at a time. What gate_logits of CpuKernels
// promises.
#if defined(MOESAIC_CPU_GATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_GATE_INL_H_
#undef MOESAIC_CPU_GATE_INL_H_
#else
#define MOESAIC_CPU_GATE_INL_H_
#endif

#include <cstring>

#include "cpu/rows-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Readers of one vector of fp32 values.
struct ReadF32 {
  using Element = float;
  static HWY_INLINE VF Load(const float* p) { return hn::LoadU(df, p); }
};
struct ReadBF16 {
  using Element = std::uint16_t;
  static HWY_INLINE VF Load(const std::uint16_t* p) { return LoadBF16(p); }
};
struct ReadF16 {
  using Element = std::uint16_t;
  static HWY_INLINE VF Load(const std::uint16_t* p) { return LoadF16(p); }
};

// The last H mod lanes elements, padded with zeros: a vector load there could leave the row.
template <class Read>
HWY_INLINE VF LoadTail(const typename Read::Element* p, std::size_t count) {
  HWY_ALIGN typename Read::Element padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(*p));
  return Read::Load(padded);
}

// kRows x kExperts dot products at once; each vector of x and W that is loaded and widened then
// serves several of them. 4 x 4 accumulators fill half of AVX-512's registers and all of AVX2's; one
// accumulator per product keeps its order of additions independent of the tile.
template <class ReadX, class ReadW, int kRows, int kExperts>
HWY_INLINE void DotTile(const std::byte* x, std::int64_t x_row_bytes, const std::byte* w,
                        std::int64_t hidden, float* out, std::int64_t out_stride) {
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
  for (; i + kLanes <= hidden; i += kLanes) {
    VF wv[kExperts];
    for (int e = 0; e < kExperts; ++e) wv[e] = ReadW::Load(ws[e] + i);
    for (int r = 0; r < kRows; ++r) {
      const VF xv = ReadX::Load(xs[r] + i);
      for (int e = 0; e < kExperts; ++e) acc[r][e] = hn::MulAdd(xv, wv[e], acc[r][e]);
    }
  }
  if (i < hidden && !MOESAIC_FAULT(gate_drop_tail)) {
    const auto count = static_cast<std::size_t>(hidden - i);
    for (int r = 0; r < kRows; ++r) {
      const VF xv = LoadTail<ReadX>(xs[r] + i, count);
      for (int e = 0; e < kExperts; ++e) {
        acc[r][e] = hn::MulAdd(xv, LoadTail<ReadW>(ws[e] + i, count), acc[r][e]);
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
void GateRectangle(const GateOperands& op, const GateBlock& b) {
  const std::int64_t h = op.hidden_size;
  const std::int64_t w_row_bytes = h * static_cast<std::int64_t>(sizeof(typename ReadW::Element));
  // Experts outermost: the four rows of W stay in the first caches while the tokens pass by.
  for (std::int64_t e = b.first_expert; e < b.end_expert;) {
    const bool four_experts = e + 4 <= b.end_expert;
    const std::byte* w = op.weight + e * w_row_bytes;
    for (std::int64_t t = b.first_token; t < b.end_token;) {
      const bool four_rows = t + 4 <= b.end_token;
      const std::byte* x = op.x + t * op.x_row_bytes;
      float* out = b.logits + (t - b.first_token) * b.logits_stride + (e - b.first_expert);
      if (four_rows && four_experts) {
        DotTile<ReadX, ReadW, 4, 4>(x, op.x_row_bytes, w, h, out, b.logits_stride);
      } else if (four_rows) {
        DotTile<ReadX, ReadW, 4, 1>(x, op.x_row_bytes, w, h, out, b.logits_stride);
      } else if (four_experts) {
        DotTile<ReadX, ReadW, 1, 4>(x, op.x_row_bytes, w, h, out, b.logits_stride);
      } else {
        DotTile<ReadX, ReadW, 1, 1>(x, op.x_row_bytes, w, h, out, b.logits_stride);
      }
      t += four_rows ? 4 : 1;
    }
    e += four_experts ? 4 : 1;
  }
}

template <class ReadX>
void GateOfWeight(const GateOperands& op, const GateBlock& block) {
  const auto kernel = op.weight_dtype == DType::kF32    ? GateRectangle<ReadX, ReadF32>
                      : op.weight_dtype == DType::kBF16 ? GateRectangle<ReadX, ReadBF16>
                                                        : GateRectangle<ReadX, ReadF16>;
  kernel(op, block);
}

void GateLogits(const GateOperands& op, const GateBlock& block) {
  const auto kernel = op.x_dtype == DType::kF32    ? GateOfWeight<ReadF32>
                      : op.x_dtype == DType::kBF16 ? GateOfWeight<ReadBF16>
                                                   : GateOfWeight<ReadF16>;
  kernel(op, block);
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
