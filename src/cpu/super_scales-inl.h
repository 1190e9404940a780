// Scales of super-blocks (super_scales.h) to F32, some steps at a time, while those behind them are
// asked for: products of an F16 number and an
// integer of at most 8 bits, which are exact.
#if defined(MOESAIC_CPU_SUPER_SCALES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_SUPER_SCALES_INL_H_
#undef MOESAIC_CPU_SUPER_SCALES_INL_H_
#else
#define MOESAIC_CPU_SUPER_SCALES_INL_H_
#endif

#include "cpu/rows-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// One vector of columns of a super-block.
template <int kBits>
struct SuperScaleColumns {
  const std::byte* planes;  // at the first column
  VF unit;

  // Written out: on ARM an implicit one is made outside of the target's functions, and is an error.
  HWY_INLINE SuperScaleColumns() {}
  HWY_INLINE SuperScaleColumns(const std::byte* first, VF of_block)
      : planes(first), unit(of_block) {}

  static HWY_INLINE VF Unit(const std::byte* units) {
    return LoadF16(reinterpret_cast<const std::uint16_t*>(units));
  }
  // The integer whose bits lie above those of three others.
  static HWY_INLINE hn::Vec<decltype(di32)> Fourth(hn::Vec<decltype(di32)> a,
                                                   hn::Vec<decltype(di32)> b,
                                                   hn::Vec<decltype(di32)> c) {
    return hn::Or(hn::ShiftRight<6>(a), hn::Or(hn::ShiftLeft<2>(hn::ShiftRight<6>(b)),
                                               hn::ShiftLeft<4>(hn::ShiftRight<6>(c))));
  }
  template <class D>
  HWY_INLINE hn::Vec<decltype(di32)> Plane(D d, std::int64_t index) const {
    const auto* at = reinterpret_cast<const hn::TFromD<D>*>(planes + index * kPanelColumns);
    return hn::PromoteTo(di32, hn::LoadU(d, at));
  }
  // Of one group.
  HWY_INLINE VF One(std::int64_t group) const {
    if constexpr (kBits == 8) {
      const hn::Rebind<std::int8_t, DF> d8;
      return hn::Mul(hn::ConvertTo(df, Plane(d8, group)), unit);
    } else {
      const hn::Rebind<std::uint8_t, DF> d8;
      const std::int64_t first = group / 4 * 3, j = group % 4;
      if (j < 3)
        return hn::Mul(hn::ConvertTo(df, hn::And(Plane(d8, first + j), hn::Set(di32, 63))), unit);
      return hn::Mul(
          hn::ConvertTo(df, Fourth(Plane(d8, first), Plane(d8, first + 1), Plane(d8, first + 2))),
          unit);
    }
  }
  // Of groups 4 * quad to 4 * quad + 3.
  HWY_INLINE void Four(std::int64_t quad, VF (&values)[4]) const {
    hn::Vec<decltype(di32)> code[4];
    if constexpr (kBits == 8) {
      const hn::Rebind<std::int8_t, DF> d8;
      for (int j = 0; j < 4; ++j) code[j] = Plane(d8, 4 * quad + j);
    } else {
      const hn::Rebind<std::uint8_t, DF> d8;
      const auto a = Plane(d8, 3 * quad), b = Plane(d8, 3 * quad + 1), c = Plane(d8, 3 * quad + 2);
      const auto low = hn::Set(di32, 63);
      code[0] = hn::And(a, low);
      code[1] = hn::And(b, low);
      code[2] = hn::And(c, low);
      code[3] = Fourth(a, b, c);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) values[j] = hn::Mul(hn::ConvertTo(df, code[j]), unit);
  }
};

HWY_INLINE void StoreGroups(const VF (&values)[4], float* out) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) hn::StoreU(values[j], df, out + j * kPanelColumns);
}

// Asks for a share of the codes: what is expanded meanwhile keeps the loads of the GEMM waiting.
struct CodeFetch {
  const std::byte* at;
  const std::byte* end;
  std::int64_t share;  // bytes

  HWY_INLINE void Share() {
    const std::byte* to = at + HWY_MIN(share, end - at);
    for (; at < to; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// A whole super-block whose groups have a scale each, or a part of one.
template <int kBits, bool kMinima, bool kOffsets>
HWY_INLINE void ExpandBlock(const std::byte* block, std::int64_t planes_of_scales,
                            std::int64_t quads, VF bias, CodeFetch& fetch, float* scales,
                            float* offsets) {
  using Columns = SuperScaleColumns<kBits>;
  constexpr std::int64_t kUnits = 2 * kPanelColumns;
  const std::byte* planes = block + kUnits * (kMinima ? 2 : 1);
  for (int c = 0; c < kPanelColumns; c += kLanes) {
    const Columns scale_columns{planes + c, Columns::Unit(block + 2 * c)};
    const Columns min_columns{planes + planes_of_scales * kPanelColumns + c,
                              kMinima ? Columns::Unit(block + kUnits + 2 * c) : hn::Zero(df)};
    float* scale_out = scales + c;
    float* offset_out = offsets == nullptr ? nullptr : offsets + c;
    for (std::int64_t quad = 0; quad < quads; ++quad) {
      fetch.Share();
      VF scale[4], offset[4];
      scale_columns.Four(quad, scale);
      StoreGroups(scale, scale_out);
      scale_out += 4 * kPanelColumns;
      if constexpr (kOffsets) {
        if constexpr (kMinima) {
          min_columns.Four(quad, offset);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) offset[j] = hn::MulAdd(scale[j], bias, offset[j]);
        } else {
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) offset[j] = hn::Mul(scale[j], bias);
        }
        StoreGroups(offset, offset_out);
        offset_out += 4 * kPanelColumns;
      }
    }
  }
}

template <int kBits, bool kMinima, bool kOffsets>
HWY_NOINLINE void ExpandSuperBlocks(const SuperScaleArgs& args) {
  const SuperScaleForm form = args.form;
  const std::int64_t block_bytes = form.block_bytes(), planes = form.planes();
  const std::int64_t per_block = form.groups() * args.per_scale, groups = args.groups;
  const int per_scale = args.per_scale;
  const VF bias = hn::Set(df, -args.bias);
  const std::byte* block = args.compact;
  const std::int64_t ahead = ceil_div(groups, per_block) * block_bytes;
  float *scales = args.scales, *offsets = args.offsets;
  const std::int64_t shares =
      ceil_div(groups, per_block) * (form.groups() / 4) * (kPanelColumns / kLanes);
  CodeFetch fetch{args.fetch, args.fetch + 64 * args.fetch_lines,
                  64 * ceil_div(args.fetch_lines, shares)};
  HWY_ALIGN float some_scales[kPanelColumns * 16], some_offsets[kPanelColumns * 16];
  for (std::int64_t first = 0; first < groups; first += per_block) {
    for (std::int64_t line = 0; line < block_bytes; line += 64)
      __builtin_prefetch(block + ahead + line, 0, 2);
    const std::int64_t count = HWY_MIN(per_block, groups - first);
    if (count == per_block && per_scale == 1) {
      ExpandBlock<kBits, kMinima, kOffsets>(block, planes, per_block / 4, bias, fetch, scales,
                                            offsets);
    } else {
      ExpandBlock<kBits, kMinima, kOffsets>(block, planes, form.groups() / 4, bias, fetch,
                                            some_scales, some_offsets);
      for (std::int64_t g = 0; g < count; ++g) {
        const std::int64_t from = g / per_scale * kPanelColumns, to = g * kPanelColumns;
        for (int c = 0; c < kPanelColumns; c += kLanes) {
          hn::StoreU(hn::Load(df, some_scales + from + c), df, scales + to + c);
          if constexpr (kOffsets)
            hn::StoreU(hn::Load(df, some_offsets + from + c), df, offsets + to + c);
        }
      }
    }
    scales += count * kPanelColumns;
    if constexpr (kOffsets) offsets += count * kPanelColumns;
    if (!MOESAIC_FAULT(cpu_super_scales_of_first_block)) block += block_bytes;
  }
}

template <int kBits>
void ExpandSuperScalesOf(const SuperScaleArgs& args) {
  if (args.offsets == nullptr) return ExpandSuperBlocks<kBits, false, false>(args);
  if (args.form.minima) return ExpandSuperBlocks<kBits, true, true>(args);
  ExpandSuperBlocks<kBits, false, true>(args);
}

void ExpandSuperScales(const SuperScaleArgs& args) {
  if (args.form.bits == 6) {
    ExpandSuperScalesOf<6>(args);
  } else {
    ExpandSuperScalesOf<8>(args);
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
