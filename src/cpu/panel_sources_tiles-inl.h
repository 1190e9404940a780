// Weights as the tile GEMM reads them: units of 256 bytes, of which a row of a tile takes 64. Codes
// are decoded by the formats of the AVX-512 kernels, a block of a row's 512 bytes at most at a time.
#if defined(MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_
#undef MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_
#else
#define MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_
#endif

#include <cstring>

#include "cpu/panel_gemm_grouped_bf16-inl.h"
#include "cpu/panel_gemm_i8-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Of a row of operands, per block of sums without scales.
constexpr int kTileBlockBytes = 512;

// --- Operands: what the two kinds of products differ in

struct TileBF16 {
  using Sum = float;
  static constexpr int kStepBytes = 2;
  template <class Tiles, int C, int A, int B>
  static HWY_INLINE void Dot() {
    Tiles::template DotBF16<C, A, B>();
  }
  // `count` steps from k0 on of a row.
  static HWY_INLINE void CopyRow(const PanelArgs&, const void* row, std::int64_t k0,
                                 std::int64_t count, std::byte* out) {
    std::memcpy(out, static_cast<const std::uint16_t*>(row) + k0,
                static_cast<std::size_t>(count) * sizeof(std::uint16_t));
  }
  static HWY_INLINE std::int32_t Start(const PanelArgs&, const void*, std::int64_t, int) {
    return 0;
  }
  static HWY_INLINE VF ToFloat(const float* sums, std::int32_t) { return hn::Load(df, sums); }
};

// kShift: see UnitQuads8::kStartShift.
template <int kShift>
struct TileI8 {
  using Sum = std::int32_t;
  static constexpr int kStepBytes = 1;
  static constexpr int kStart = sizeof(std::int32_t);
  template <class Tiles, int C, int A, int B>
  static HWY_INLINE void Dot() {
    Tiles::template DotI8<C, A, B>();
  }
  static HWY_INLINE void CopyRow(const PanelArgs& args, const void* row, std::int64_t k0,
                                 std::int64_t count, std::byte* out) {
    const auto* codes = static_cast<const std::byte*>(row) + dot_row_bytes(k0, args.fold);
    for (std::int64_t k = 0; k < count; k += args.fold, codes += kStart + args.fold)
      std::memcpy(out + k, codes + kStart, static_cast<std::size_t>(args.fold));
  }
  // Where the sums of `count` groups of args.fold steps from step k0 on start.
  static HWY_INLINE std::int32_t Start(const PanelArgs& args, const void* row, std::int64_t k0,
                                       int count) {
    if (MOESAIC_FAULT(cpu_tiles_without_start)) return 0;
    const auto* group = static_cast<const std::byte*>(row) + dot_row_bytes(k0, args.fold);
    std::int32_t sum = 0;
    for (int g = 0; g < count; ++g, group += kStart + args.fold) {
      std::int32_t start;
      std::memcpy(&start, group, sizeof(start));
      sum += start;
    }
    return sum / (1 << kShift);
  }
  static HWY_INLINE VF ToFloat(const std::int32_t* sums, std::int32_t start) {
    return hn::ConvertTo(df, hn::Add(hn::Load(di32, sums), hn::Set(di32, start)));
  }
};

// --- Sources

// Units that lie in the panel as tiles read them.
template <class OperandType>
struct UnitsInPlace {
  using Operand = OperandType;
  using AnyScale = UnitsInPlace;
  static constexpr int kSteps = 4 / Operand::kStepBytes;  // of a unit
  static constexpr bool kHoldsGroup = false;
  explicit UnitsInPlace(const PanelArgs&) {}
  // Steps k0 to k0 + count, whose first unit is w; `padded` of them as a whole number of tiles,
  // those beyond as zeros. Null: see Pairs::Begin.
  HWY_INLINE const std::byte* Load(const PanelArgs&, const std::byte* w, std::int64_t,
                                   std::int64_t count, std::int64_t padded, std::byte* buffer) {
    if (count == padded) return w;
    const std::int64_t bytes = count / kSteps * kUnitBytes;
    std::memcpy(buffer, w, static_cast<std::size_t>(bytes));
    std::memset(buffer + bytes, 0, static_cast<std::size_t>(padded / kSteps * kUnitBytes - bytes));
    return buffer;
  }
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    return ExpandScales(args, group, buffer);
  }
};

// Codes that `Pairs` decodes to bf16.
template <class Pairs>
struct DecodedUnits {
  using Operand = TileBF16;
  using AnyScale = DecodedUnits<typename Pairs::AnyScale>;
  static constexpr int kSteps = Pairs::kSteps;
  static constexpr bool kHoldsGroup = HoldsGroup<Pairs>;
  Pairs pairs;
  explicit DecodedUnits(const PanelArgs& args) : pairs(args) {}
  HWY_INLINE const std::byte* Load(const PanelArgs& args, const std::byte* w, std::int64_t k0,
                                   std::int64_t count, std::int64_t padded, std::byte* buffer) {
    if (HWY_UNLIKELY(!pairs.Begin(args, k0 / args.fold, 0))) return nullptr;
    auto* out = reinterpret_cast<std::uint32_t*>(buffer);
    for (std::int64_t k = 0; k < count; k += kSteps, w += kUnitBytes) {
      DecodeUnit(pairs, w, out);
      out += kSteps / 2 * kPanelColumns;
    }
    std::memset(out, 0, static_cast<std::size_t>((padded - count) / 2 * kUnitBytes));
    return buffer;
  }
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    return Pairs::Scales(args, group, buffer);
  }
};

struct DecodedQuads4 : UnitsInPlace<TileI8<UnitQuads4::kStartShift>> {
  using AnyScale = DecodedQuads4;
  static constexpr int kSteps = UnitQuads4::kSteps;
  using UnitsInPlace::UnitsInPlace;
  HWY_INLINE const std::byte* Load(const PanelArgs&, const std::byte* w, std::int64_t,
                                   std::int64_t count, std::int64_t, std::byte* buffer) {
    DecodeQuads4(w, count / kSteps * kUnitBytes, buffer);
    return buffer;
  }
};

// The plain GEMM's scales, one per 16 columns and 128 steps, as a grouped one has them.
template <class Source>
struct StripScaled : Source {
  using AnyScale = StripScaled;
  using Source::Source;
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    for (int c = 0; c < kPanelColumns; ++c)
      buffer[c] = args.panel_scales == nullptr ? 1.0F : args.panel_scales[group * 4 + c / 16];
    return buffer;
  }
};

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
