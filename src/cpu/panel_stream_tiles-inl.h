// Few rows, which are limited by memory: the sums of the tile products, in their order, on vector
// registers. Codes need not pass through memory, and reading goes on while sums are folded.
//
// A tile product of 32 steps is two chains of fused multiply-adds, one of the even steps and one of
// the odd ones, whose sum is added to the tile's (docs/design/cpu-gemm.md).
#if defined(MOESAIC_CPU_PANEL_STREAM_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_STREAM_TILES_INL_H_
#undef MOESAIC_CPU_PANEL_STREAM_TILES_INL_H_
#else
#define MOESAIC_CPU_PANEL_STREAM_TILES_INL_H_
#endif

#include "cpu/panel_sources_tiles-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// chain[r][v][0] and [1]: the even and the odd steps of MR rows and 16 v columns.
template <int MR>
using TileChains = VF[MR][4][2];

// A unit's steps for MR rows; x: [MR][..] fp32.
template <class Pairs, int MR>
HWY_INLINE void AddUnit(const Pairs& pairs, const std::byte* w, const float* const (&x)[MR],
                        TileChains<MR>& chain) {
  const auto upper = hn::Set(du32, 0xFFFF0000U);
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    __m512i pair[Pairs::kSteps / 2];
    pairs.Decode(v, Pairs::Load(w + 64 * v), pair, 0);
#pragma GCC unroll 8
    for (int s = 0; s < Pairs::kSteps / 2; ++s) {
      const hn::Vec<decltype(du32)> bits{pair[s]};
      const VF even = hn::BitCast(df, hn::ShiftLeft<16>(bits));
      const VF odd = hn::BitCast(df, hn::And(bits, upper));
#pragma GCC unroll 2
      for (int r = 0; r < MR; ++r) {
        chain[r][v][0] = hn::MulAdd(even, hn::Set(df, x[r][2 * s]), chain[r][v][0]);
        chain[r][v][1] = hn::MulAdd(odd, hn::Set(df, x[r][2 * s + 1]), chain[r][v][1]);
      }
    }
  }
}

// For its lifetime subnormal numbers are zeros, as they are to the tile products (but not to folds).
// The compiler does not know that arithmetic depends on it: what enters and what leaves is pinned.
class FlushMode {
 public:
  HWY_INLINE FlushMode() : saved_(_mm_getcsr()) {
    _mm_setcsr(MOESAIC_FAULT(cpu_tiles_stream_keeps_subnormals) ? saved_ : saved_ | 0x8040U);
    __asm__ volatile("" : : : "memory");
  }
  template <int MR>
  HWY_INLINE void End(VF (&acc)[MR][4]) const {
    Pin(acc);
    _mm_setcsr(saved_);
    Pin(acc);
  }

 private:
  template <int MR>
  static HWY_INLINE void Pin(VF (&acc)[MR][4]) {
#pragma GCC unroll 2
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) __asm__ volatile("" : "+v"(acc[r][v].raw) : : "memory");
    }
  }
  unsigned saved_;
};

// `count` steps of a row as fp32.
HWY_INLINE void WidenSteps(const void* row, std::int64_t k0, std::int64_t count, float* out) {
  const auto* steps = static_cast<const std::uint16_t*>(row) + k0;
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const hn::Rebind<std::uint16_t, DF> du16;
    const auto wide = hn::PromoteTo(du32, hn::LoadU(du16, steps + k));
    hn::Store(hn::BitCast(df, hn::ShiftLeft<16>(wide)), df, out + k);
  }
}

// False: a group's scales want AnyScale, see Pairs::Begin.
template <class Source, int MR>
HWY_NOINLINE bool StreamAsTiles(const PanelArgs& args, const TileSteps& steps) {
  using Pairs = typename Source::Pairs;
  constexpr std::int64_t kMost = Source::kBlockBytes / 2;
  Source source(args);
  alignas(64) float x[MR][kMost];
  alignas(64) float buffer[kPanelColumns];
  VF total[MR][4];
  StartTotal<MR>(args, total);
  const std::byte* w = args.panel;
  std::int64_t group = 0;
  VF acc[MR][4];
  ClearTile<MR>(acc);
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += steps.fold, ++group) {
    const std::int64_t count = std::min<std::int64_t>(steps.fold, args.padded_k - k0);
    if (steps.scaled) PrefetchScales(args, group);
    if (HWY_UNLIKELY(!source.Begin(args, k0))) return false;
    for (int r = 0; r < MR; ++r) WidenSteps(args.rows[r], k0, count, x[r]);
    if (!steps.chained) ClearTile<MR>(acc);
    const FlushMode flush;
    for (std::int64_t k = 0; k < count; k += steps.product) {
      TileChains<MR> chain;
      for (int r = 0; r < MR; ++r) {
        for (int v = 0; v < 4; ++v) chain[r][v][0] = chain[r][v][1] = hn::Zero(df);
      }
      for (int s = 0; s < steps.product; s += Pairs::kSteps, w += Pairs::kBytes) {
#pragma GCC unroll 12
        for (int line = 0; line < Pairs::kBytes / 64; ++line)
          __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
        const float* at[MR];
        for (int r = 0; r < MR; ++r) at[r] = x[r] + k + s;
        AddUnit<Pairs, MR>(source.pairs, w, at, chain);
      }
      for (int r = 0; r < MR; ++r) {
        for (int v = 0; v < 4; ++v)
          acc[r][v] = hn::Add(acc[r][v], hn::Add(chain[r][v][0], chain[r][v][1]));
      }
    }
    flush.End<MR>(acc);
    if (steps.chained) continue;
    const GroupFold fold(args, group);
    const float* scales = steps.scaled ? Source::Scales(args, group, buffer) : nullptr;
    for (int v = 0; v < 4; ++v) {
      const VF scale = scales == nullptr ? hn::Set(df, 1.0F) : hn::LoadU(df, scales + 16 * v);
      for (int r = 0; r < MR; ++r)
        total[r][v] = fold.template Into<false>(total[r][v], acc[r][v], scale, r, 16 * v);
    }
  }
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < 4; ++v)
      hn::Store(steps.chained ? acc[r][v] : total[r][v], df,
                args.result + r * kPanelColumns + 16 * v);
  }
  return true;
}

// Sums of int8 codes as tiles have them, on the 8-bit dot product: exact, so in any order. At most
// six rows, without scales.
template <int MR>
HWY_NOINLINE void StreamI8AsTiles(const PanelArgs& args, const TileSteps& steps) {
  VF total[MR][4];
  ClearTile<MR>(total);
  const std::byte* w = args.panel;
  const std::int64_t fold = steps.chained ? args.padded_k : steps.fold;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += fold) {
    const std::int64_t count = std::min<std::int64_t>(fold, args.padded_k - k0);
    VI acc[MR][4];
    for (int r = 0; r < MR; ++r) {
      for (int v = 0; v < 4; ++v) acc[r][v] = hn::Zero(di32);
    }
    for (std::int64_t k = k0; k < k0 + count; k += args.fold) {
      const std::uint8_t* a[MR];
      for (int r = 0; r < MR; ++r) {
        a[r] = static_cast<const std::uint8_t*>(args.rows[r]) + dot_row_bytes(k, args.fold) +
               TileI8::kStart;
      }
      for (int at = 0; at < args.fold; at += UnitQuads8::kSteps, w += kUnitBytes) {
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line)
          __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
        StepI8<UnitQuads8, 0, MR>(w, a, at, acc);
      }
    }
    for (int r = 0; r < MR; ++r) {
      const VI start = hn::Set(di32, TileI8::Start(args, args.rows[r], k0, count));
      for (int v = 0; v < 4; ++v)
        total[r][v] = hn::Add(total[r][v], hn::ConvertTo(df, hn::Add(acc[r][v], start)));
    }
  }
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < 4; ++v)
      hn::Store(total[r][v], df, args.result + r * kPanelColumns + 16 * v);
  }
}
constexpr void (*kStreamsI8[])(const PanelArgs&, const TileSteps&) = {nullptr,
                                                                      StreamI8AsTiles<1>,
                                                                      StreamI8AsTiles<2>,
                                                                      StreamI8AsTiles<3>,
                                                                      StreamI8AsTiles<4>,
                                                                      StreamI8AsTiles<5>,
                                                                      StreamI8AsTiles<6>};

// Whether it was done here: rows and steps are what the above is for.
template <class Source>
HWY_INLINE bool Streamed(const PanelArgs& args, const TileSteps& steps) {
  if (args.padded_k % steps.product != 0) return false;
  if constexpr (Source::Operand::kStepBytes == 1) {
    if (args.num_rows > 6 || steps.scaled) return false;
    kStreamsI8[args.num_rows](args, steps);
    return true;
  } else {
    if (args.num_rows == 1) return StreamAsTiles<Source, 1>(args, steps);
    if (args.num_rows == 2) return StreamAsTiles<Source, 2>(args, steps);
    return false;
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
