// Operands and weights of the tile GEMM: units of 256 bytes, of which a row of a tile takes 64. Codes
// are decoded by the formats of the AVX-512 kernels.
#if defined(MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_
#undef MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_
#else
#define MOESAIC_CPU_PANEL_SOURCES_TILES_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "cpu/panel_gemm_grouped_bf16-inl.h"
#include "cpu/panel_gemm_i8-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// --- Operands: what the two kinds of products differ in

struct TileBF16 {
  static constexpr int kStepBytes = 2;
  static constexpr bool kFloatSums = true;
  static constexpr std::int64_t kMostSteps = INT64_MAX;  // of one accumulator
  template <class Tiles, int C, int A, int B>
  static HWY_INLINE void Dot() {
    Tiles::template DotBF16<C, A, B>();
  }
  // Where step k0 of a row lies, and how many bytes lie between its folds.
  static constexpr int kGap = 0;
  static HWY_INLINE std::int64_t Offset(const PanelArgs&, std::int64_t k0) {
    return k0 * kStepBytes;
  }
  // `count` steps from k0 on of a row.
  static HWY_INLINE void CopyRow(const PanelArgs&, const void* row, std::int64_t k0,
                                 std::int64_t count, std::byte* out) {
    std::memcpy(out, static_cast<const std::uint16_t*>(row) + k0,
                static_cast<std::size_t>(count) * sizeof(std::uint16_t));
  }
  static HWY_INLINE std::int32_t Start(const PanelArgs&, const void*, std::int64_t, std::int64_t) {
    return 0;
  }
  // Sums as a tile holds them.
  static HWY_INLINE VF ToFloat(VF sums, std::int32_t) { return sums; }
};

// Rows as StoreI8 leaves them.
struct TileI8 {
  static constexpr int kStepBytes = 1;
  static constexpr bool kFloatSums = false;
  static constexpr std::int64_t kMostSteps = 65536;  // of one accumulator: 255 * 128 each
  static constexpr int kStart = sizeof(std::int32_t);
  static constexpr int kGap = kStart;
  static HWY_INLINE std::int64_t Offset(const PanelArgs& args, std::int64_t k0) {
    return dot_row_bytes(k0, args.fold) + kStart;
  }
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
  // Where the sums of `count` steps from k0 on start.
  static HWY_INLINE std::int32_t Start(const PanelArgs& args, const void* row, std::int64_t k0,
                                       std::int64_t count) {
    if (MOESAIC_FAULT(cpu_tiles_without_start)) return 0;
    const auto* group = static_cast<const std::byte*>(row) + dot_row_bytes(k0, args.fold);
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < count; k += args.fold, group += kStart + args.fold) {
      std::int32_t start;
      std::memcpy(&start, group, sizeof(start));
      sum += start;
    }
    return sum;
  }
  static HWY_INLINE VF ToFloat(VF sums, std::int32_t start) {
    return hn::ConvertTo(df, hn::Add(hn::BitCast(di32, sums), hn::Set(di32, start)));
  }
};

// --- Sources

// bf16 units as they lie.
struct PairsInPlace {
  static constexpr int kSteps = 2;
  static constexpr std::int64_t kBytes = kUnitBytes;
  explicit PairsInPlace(const PanelArgs&) {}
  static HWY_INLINE __m512i Load(const std::byte* w) { return _mm512_load_si512(w); }
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[1], int) const { pair[0] = raw; }
};

// Units that lie in the panel as tiles read them. kBlockBytes: of a row of operands, per block of
// sums without scales: 1024 steps, whose int8 products sum to at most 2^24, exact in fp32 where
// they are folded (TileSteps::chained).
template <class OperandType>
struct UnitsInPlace {
  using Operand = OperandType;
  using AnyScale = UnitsInPlace;
  static constexpr int kSteps = 4 / Operand::kStepBytes;  // of a unit
  static constexpr std::int64_t kBytes = kUnitBytes;
  static constexpr int kBlockBytes = 1024 * Operand::kStepBytes;
  static constexpr bool kDecodes = false;
  static constexpr bool kHoldsGroup = false;
  using Pairs = PairsInPlace;  // of bf16
  PairsInPlace pairs;
  explicit UnitsInPlace(const PanelArgs& args) : pairs(args) {}
  // What is held of the group of step k0; false: see Pairs::Begin.
  HWY_INLINE bool Begin(const PanelArgs&, std::int64_t) { return true; }
  // `count` units at w to kExpands times as many of kUnitBytes.
  static constexpr int kExpands = 1;
  HWY_INLINE void Decode(const std::byte* w, std::int64_t count, std::byte* out) const {
    std::memcpy(out, w, static_cast<std::size_t>(count * kUnitBytes));
  }
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    return ExpandScales(args, group, buffer);
  }
};

// Codes that `Pairs` decodes to bf16.
template <class PairsType>
struct DecodedUnits {
  using Pairs = PairsType;
  using Operand = TileBF16;
  using AnyScale = DecodedUnits<typename Pairs::AnyScale>;
  static constexpr int kSteps = Pairs::kSteps;
  static constexpr std::int64_t kBytes = Pairs::kBytes;
  static constexpr int kBlockBytes = 512;
  static constexpr bool kDecodes = true;
  static constexpr bool kHoldsGroup = HoldsGroup<Pairs>;
  Pairs pairs;
  explicit DecodedUnits(const PanelArgs& args) : pairs(args) {}
  HWY_INLINE bool Begin(const PanelArgs& args, std::int64_t k0) {
    return pairs.Begin(args, k0 / args.fold, 0);
  }
  static constexpr int kExpands = kSteps / 2;
  HWY_INLINE void Decode(const std::byte* w, std::int64_t count, std::byte* out) const {
    for (std::int64_t u = 0; u < count; ++u, w += kBytes, out += kExpands * kUnitBytes) {
      for (int line = 0; line < kBytes / 64; ++line)
        __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
      DecodeUnit(pairs, w, reinterpret_cast<std::uint32_t*>(out));
    }
  }
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    return Pairs::Scales(args, group, buffer);
  }
};

// The plain GEMM's scales, one per 16 columns and 128 steps, as a grouped one has them.
template <class Source>
struct StripScaled : Source {
  using AnyScale = StripScaled;
  using Source::Source;
  static HWY_INLINE const float* Scales(const PanelArgs& args, std::int64_t group, float* buffer) {
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      const float* strips = args.panel_scales;
      hn::Store(hn::Set(df, strips == nullptr ? 1.0F : strips[group * 4 + c / 16]), df, buffer + c);
    }
    return buffer;
  }
};

// How a call's sums are cut: blocks of steps, folds of them, products of a fold. Chained: nothing
// scales a part of a sum, which goes on from block to block in one accumulator and has no folds.
struct TileSteps {
  int block, fold, product;
  bool scaled, chained;
};
template <class Source>
HWY_INLINE TileSteps StepsOf(const PanelArgs& args, bool scaled) {
  using Operand = typename Source::Operand;
  constexpr int kUnscaled = Source::kBlockBytes / Operand::kStepBytes;
  const bool chained = !scaled && !args.accumulate && args.padded_k <= Operand::kMostSteps;
  const int fold = scaled ? args.fold : kUnscaled;
  const int block = !scaled ? kUnscaled : Source::kHoldsGroup ? fold : kGroup;
  return {block, fold, std::min(fold, 64 / Operand::kStepBytes), scaled, chained};
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
