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

HWY_INLINE void StoreGroups(const VF (&values)[4], float* out) {
  for (int j = 0; j < 4; ++j) hn::StoreU(values[j], df, out + j * kPanelColumns);
}

template <int kBits>
HWY_NOINLINE void ExpandSuperBlocks(const SuperScaleArgs& args) {
  using Columns = SuperScaleColumns<kBits>;
  constexpr int kVectors = kPanelColumns / kLanes;
  const SuperScaleForm& form = args.form;
  const std::int64_t per_block = form.groups() * args.per_scale;
  const VF bias = hn::Set(df, -args.bias);
  const std::byte* block = args.compact;
  const std::int64_t ahead = ceil_div(args.groups, per_block) * form.block_bytes();
  for (std::int64_t first = 0; first < args.groups; first += per_block) {
    for (std::int64_t line = 0; line < form.block_bytes(); line += 64)
      __builtin_prefetch(block + ahead + line, 0, 2);
    const std::byte* planes = block + kPanelColumns * (form.minima ? 4 : 2);
    VF scale_unit[kVectors], min_unit[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const std::byte* unit = block + 2 * v * kLanes;
      scale_unit[v] = Columns::Unit(unit);
      min_unit[v] = form.minima ? Columns::Unit(unit + 2 * kPanelColumns) : hn::Zero(df);
    }
    const std::int64_t count = HWY_MIN(per_block, args.groups - first);
    for (std::int64_t quad = 0; 4 * quad * args.per_scale < count; ++quad) {
      // Groups of `fold` steps of this quad of scales, counted from its first.
      const std::int64_t from = 4 * quad * args.per_scale;
      const auto groups = static_cast<int>(HWY_MIN(count - from, std::int64_t{4} * args.per_scale));
      for (int v = 0; v < kVectors; ++v) {
        const std::int64_t at = (first + from) * kPanelColumns + v * kLanes;
        VF scale[4], offset[4];
        Columns{planes + v * kLanes, scale_unit[v]}.Four(quad, scale);
        for (int j = 0; j < 4; ++j) offset[j] = hn::Zero(df);
        if (form.minima) {
          const std::byte* minima = planes + form.planes() * kPanelColumns + v * kLanes;
          Columns{minima, min_unit[v]}.Four(quad, offset);
        }
        if (args.offsets != nullptr) {
          for (int j = 0; j < 4; ++j) offset[j] = hn::MulAdd(scale[j], bias, offset[j]);
        }
        if (groups == 4 && args.per_scale == 1) {
          StoreGroups(scale, args.scales + at);
          if (args.offsets != nullptr) StoreGroups(offset, args.offsets + at);
          continue;
        }
        for (int g = 0; g < groups; ++g) {
          hn::StoreU(scale[g / args.per_scale], df, args.scales + at + g * kPanelColumns);
          if (args.offsets != nullptr)
            hn::StoreU(offset[g / args.per_scale], df, args.offsets + at + g * kPanelColumns);
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
