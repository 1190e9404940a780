// Scales of super-blocks (super_scales.h) to F32, a panel at a time: products of an F16 number and an
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

  static HWY_INLINE VF Unit(const std::byte* units) {
    const hn::Rebind<std::uint16_t, DF> du16;
    return F16BitsToF32(
        hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(units))));
  }
  template <class D>
  HWY_INLINE hn::Vec<decltype(di32)> Plane(D d, std::int64_t index) const {
    const auto* at = reinterpret_cast<const hn::TFromD<D>*>(planes + index * kPanelColumns);
    return hn::PromoteTo(di32, hn::LoadU(d, at));
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
      code[3] = hn::Or(hn::ShiftRight<6>(a), hn::Or(hn::ShiftLeft<2>(hn::ShiftRight<6>(b)),
                                                    hn::ShiftLeft<4>(hn::ShiftRight<6>(c))));
    }
    for (int j = 0; j < 4; ++j) values[j] = hn::Mul(hn::ConvertTo(df, code[j]), unit);
  }
};

template <int kBits>
HWY_NOINLINE void ExpandSuperBlocks(const SuperScaleArgs& args) {
  const SuperScaleForm& form = args.form;
  const std::int64_t per_block = form.groups() * args.per_scale;
  const VF bias = hn::Set(df, -args.bias);
  const std::byte* block = args.compact;
  for (std::int64_t first = 0; first < args.groups; first += per_block) {
    const std::int64_t count = HWY_MIN(per_block, args.groups - first);
    const std::byte* planes = block + kPanelColumns * (form.minima ? 4 : 2);
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      using Columns = SuperScaleColumns<kBits>;
      const Columns scales{planes + c, Columns::Unit(block + 2 * c)};
      Columns minima = scales;
      if (form.minima) {
        minima.planes += form.planes() * kPanelColumns;
        minima.unit = Columns::Unit(block + 2 * (kPanelColumns + c));
      }
      std::int64_t group = 0;
      for (std::int64_t quad = 0; group < count; ++quad) {
        VF scale[4], min[4];
        scales.Four(quad, scale);
        if (form.minima) minima.Four(quad, min);
        for (int j = 0; j < 4; ++j) {
          const VF offset = hn::MulAdd(scale[j], bias, form.minima ? min[j] : hn::Zero(df));
          for (int i = 0; i < args.per_scale && group < count; ++i, ++group) {
            const std::int64_t at = (first + group) * kPanelColumns + c;
            hn::StoreU(scale[j], df, args.scales + at);
            if (args.offsets != nullptr) hn::StoreU(offset, df, args.offsets + at);
          }
        }
      }
    }
    if (!MOESAIC_FAULT(cpu_super_scales_of_first_block)) block += form.block_bytes();
  }
}

void ExpandSuperScales(const SuperScaleArgs& args) {
  if (args.form.bits == 6) {
    ExpandSuperBlocks<6>(args);
  } else {
    ExpandSuperBlocks<8>(args);
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
