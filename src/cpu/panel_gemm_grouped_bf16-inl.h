// The grouped panel GEMM on the bf16 dot-product instruction, for the formats of
// panel_formats_bf16-inl.h. Regimes and prefetch distances as in panel_gemm_bf16-inl.h:
//   1 or 2 rows    decoded in registers, results in registers; limited by memory
//   3 to 6 rows    decoded in registers, results in memory
//   7 and more     the first tile of rows decodes up to 128 steps into L1, the others pass over them
#if defined(MOESAIC_CPU_PANEL_GEMM_GROUPED_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_GROUPED_BF16_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_GROUPED_BF16_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_GROUPED_BF16_INL_H_
#endif

#include <type_traits>

#include "cpu/panel_formats_bf16-inl.h"
#include "cpu/panel_tile16_bf16-inl.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Pair P of a unit for MR rows. The weights are read again for every pair: in registers they would
// push accumulators out.
template <int P, class Pairs, int MR>
HWY_INLINE void StepOfUnit(const Pairs& pairs, const std::byte* w,
                           const std::uint16_t* const (&a)[MR], std::int64_t k, VF (&acc)[MR][4]) {
  __asm__("" : "+r"(w));
  __m512i wv[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    wv[v] = pairs.template Pair<P>(Pairs::Load(w + 64 * v));
  }
  DotRows<MR>(wv, a, k + 2 * P, acc);
}

// All pairs of a unit, one after the other.
template <class Pairs, int MR, int P = 0>
HWY_INLINE void StepsOfUnit(const Pairs& pairs, const std::byte* w,
                            const std::uint16_t* const (&a)[MR], std::int64_t k, VF (&acc)[MR][4]) {
  StepOfUnit<P>(pairs, w, a, k, acc);
  if constexpr (2 * (P + 1) < Pairs::kSteps) StepsOfUnit<Pairs, MR, P + 1>(pairs, w, a, k, acc);
}

// A unit as kSteps / 2 bf16 units.
template <class Pairs>
HWY_INLINE void DecodeUnit(const Pairs& pairs, const std::byte* w, std::uint32_t* out) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    __m512i pair[Pairs::kSteps / 2];
    pairs.Decode(v, Pairs::Load(w + 64 * v), pair, 0);
#pragma GCC unroll 8
    for (int step = 0; step < Pairs::kSteps / 2; ++step)
      _mm512_store_si512(out + step * kPanelColumns + 16 * v, pair[step]);
  }
}

// acc = kGroups groups of args.fold steps each, decoded in registers, for the first MR rows.
template <class Pairs, int MR, int kGroups>
HWY_INLINE void GroupsInRegisters(const PanelArgs& args, const Pairs& pairs, std::int64_t k0,
                                  const std::byte* w, VF (&acc)[kGroups][MR][4]) {
  const std::uint16_t* a[MR];
  for (int r = 0; r < MR; ++r) a[r] = static_cast<const std::uint16_t*>(args.rows[r]) + k0;
  const std::int64_t group_bytes = args.fold / Pairs::kSteps * Pairs::kBytes;
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) ClearTile<MR>(acc[g]);
  for (int k = 0; k < args.fold; k += Pairs::kSteps, w += Pairs::kBytes) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      const std::byte* unit = w + g * group_bytes;
      const std::int64_t step0 = k + g * std::int64_t{args.fold};
#pragma GCC unroll 12
      for (int line = 0; line < Pairs::kBytes / 64; ++line)
        __builtin_prefetch(unit + kGroups * kStreamPrefetchBytes + 64 * line, 0, 2);
      if constexpr (Pairs::kByPairs && MR > 3) {
        StepsOfUnit<Pairs, MR>(pairs, unit, a, step0, acc[g]);
        continue;
      }
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair[Pairs::kSteps / 2];
        pairs.Decode(v, Pairs::Load(unit + 64 * v), pair, g);
#pragma GCC unroll 8
        for (int step = 0; step < Pairs::kSteps / 2; ++step) {
#pragma GCC unroll 6
          for (int r = 0; r < MR; ++r) {
            const __m512i x = BroadcastPair(a[r], step0 + 2 * step);
            acc[g][r][v].raw = DotPair(acc[g][r][v].raw, pair[step], x);
          }
        }
      }
    }
  }
}

// The scales are a second stream, a small fraction of the first. No loop but one that the compiler
// unrolls: with short groups that is a fifth of the time.
HWY_INLINE void PrefetchScales(const PanelArgs& args, std::int64_t group) {
  if (args.group_scales == nullptr) return;
  const std::int64_t bytes = kPanelColumns * bytes_of(args.group_scale_form);
  for (std::int64_t line = 0; line < bytes; line += 64)
    __builtin_prefetch(args.group_scales + (group + 4) * bytes + line, 0, 2);
}

template <class Pairs>
void GroupedBlocks(const PanelArgs& args);

// Adds kGroups groups from `group` on, whose first unit is w, to total. False: see Pairs::Begin.
template <class Pairs, int MR, int kGroups>
HWY_INLINE bool StreamGroups(const PanelArgs& args, Pairs& pairs, std::int64_t group,
                             const std::byte* w, VF (&total)[MR][4]) {
  HWY_ALIGN float buffer[kPanelColumns];
  VF acc[kGroups][MR][4];
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
    PrefetchScales(args, group + g);
    if (HWY_UNLIKELY(!pairs.Begin(args, group + g, g))) return false;
  }
  GroupsInRegisters<Pairs, MR, kGroups>(args, pairs, group * args.fold, w, acc);
#pragma GCC unroll 2
  for (int g = 0; g < kGroups; ++g) {
    const float* scales = Pairs::Scales(args, group + g, buffer);
    const GroupFold fold(args, group + g);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const VF scale = hn::LoadU(df, scales + 16 * v);
#pragma GCC unroll 2
      for (int r = 0; r < MR; ++r)
        total[r][v] = fold.Into<false>(total[r][v], acc[g][r][v], scale, r, 16 * v);
    }
  }
  return true;
}

// The result so far, of the first MR rows.
template <int MR>
HWY_INLINE void StartTotal(const PanelArgs& args, VF (&total)[MR][4]) {
  ClearTile<MR>(total);
  if (!args.accumulate) return;
#pragma GCC unroll 2
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      total[r][v] = hn::Load(df, args.result + r * kPanelColumns + 16 * v);
  }
}

// kGroups groups at a time: independent chains, folded in their order.
template <class Pairs, int MR, int kGroups>
HWY_NOINLINE void GroupedStream(const PanelArgs& args) {
  Pairs pairs(args);
  VF total[MR][4];
  StartTotal<MR>(args, total);
  const std::byte* w = args.panel;
  const std::int64_t group_bytes = args.fold / Pairs::kSteps * Pairs::kBytes;
  const std::int64_t groups = args.padded_k / args.fold;
  std::int64_t group = 0;
  for (; group + kGroups <= groups; group += kGroups, w += kGroups * group_bytes) {
    if (!StreamGroups<Pairs, MR, kGroups>(args, pairs, group, w, total))
      return GroupedBlocks<typename Pairs::AnyScale>(args);
  }
  if (group < groups && !StreamGroups<Pairs, MR, 1>(args, pairs, group, w, total))
    return GroupedBlocks<typename Pairs::AnyScale>(args);
#pragma GCC unroll 2
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      hn::Store(total[r][v], df, args.result + r * kPanelColumns + 16 * v);
  }
}

template <class Pairs, int MR>
HWY_NOINLINE void GroupedDirect(const PanelArgs& args) {
  Pairs pairs(args);
  HWY_ALIGN float buffer[kPanelColumns];
  ClearResult(args);
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += args.fold, ++group) {
    VF acc[1][MR][4];
    PrefetchScales(args, group);
    if (HWY_UNLIKELY(!pairs.Begin(args, group, 0)))
      return GroupedBlocks<typename Pairs::AnyScale>(args);
    GroupsInRegisters<Pairs, MR, 1>(args, pairs, k0, w, acc);
    w += args.fold / Pairs::kSteps * Pairs::kBytes;
    FoldColumns<MR, 4>(args, acc[0], Pairs::Scales(args, group, buffer), group, 0, 0);
  }
}

// What the other tiles of a block read: nothing left to decode.
struct PairsDecoded {
  static constexpr int kSteps = 2;
};

// A block's groups for MR rows. Pairs other than PairsDecoded: on the way its units from `w` to
// `end` are decoded, one ahead of the multiply-adds, which read what was decoded a unit ago. (With
// multiply-adds from registers the stores cost as much as in a pass of their own.)
template <class Pairs, int MR>
HWY_NOINLINE void RunGroupedTile(const PanelArgs& args, const GroupedBlock& block,
                                 const Pairs& pairs, const std::byte* w, const std::byte* end) {
  constexpr bool kDecodes = !std::is_same_v<Pairs, PairsDecoded>;
  constexpr int kDecoded = Pairs::kSteps / 2 * kUnitBytes;
  const std::uint16_t* a[MR];
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const std::uint16_t*>(args.rows[block.row + r]) + block.k0;
  auto* decoded = reinterpret_cast<std::byte*>(block.w);
  if constexpr (kDecodes) DecodeUnit(pairs, w, block.w);
  for (int group = 0; group < block.groups; ++group) {
    VF acc[MR][4];
    ClearTile<MR>(acc);
    const std::int64_t first = group * args.fold;
    for (std::int64_t k = 0; k < args.fold; k += Pairs::kSteps, decoded += kDecoded) {
      if constexpr (kDecodes) {
        w += Pairs::kBytes;
        if (w < end) DecodeUnit(pairs, w, reinterpret_cast<std::uint32_t*>(decoded + kDecoded));
      }
#pragma GCC unroll 8
      for (int pair = 0; pair < Pairs::kSteps / 2; ++pair)
        StepBF16<MR>(decoded + pair * kUnitBytes, a, first + k + 2 * pair, acc);
    }
    FoldColumns<MR, 4>(args, acc, block.scales + group * kPanelColumns, block.group + group,
                       block.row, 0);
  }
}

template <class Pairs>
using GroupedTileFn = void (*)(const PanelArgs&, const GroupedBlock&, const Pairs&,
                               const std::byte* w, const std::byte* end);
template <class Pairs>
constexpr GroupedTileFn<Pairs> kGroupedTiles[7] = {nullptr,
                                                   RunGroupedTile<Pairs, 1>,
                                                   RunGroupedTile<Pairs, 2>,
                                                   RunGroupedTile<Pairs, 3>,
                                                   RunGroupedTile<Pairs, 4>,
                                                   RunGroupedTile<Pairs, 5>,
                                                   RunGroupedTile<Pairs, 6>};

constexpr int kFinestFold = 16;

// Pairs that hold something of the group that they decode.
template <class Pairs>
concept HoldsGroup = requires {
  requires Pairs::kHoldsGroup;
};

template <class Pairs>
HWY_NOINLINE void GroupedBlocks(const PanelArgs& args) {
  ClearResult(args);
  Pairs pairs(args);
  HWY_ALIGN std::uint32_t decoded[kGroup / 2 * kPanelColumns];  // 16 KiB, L1
  HWY_ALIGN float scales[kGroup / kFinestFold * kPanelColumns];
  const std::byte* w = args.panel;
  const bool of16 = args.fold == 16 && GroupFold(args, 0).plain();
  GroupedBlock block;
  block.w = decoded;
  block.scales = scales;
  const std::int64_t steps =
      HoldsGroup<Pairs> && !MOESAIC_FAULT(cpu_block_decodes_by_its_first_group) ? args.fold
                                                                                : kGroup;
  for (; block.k0 < args.padded_k; block.k0 += steps, block.group += block.groups) {
    const auto k_count = HWY_MIN(steps, args.padded_k - block.k0);
    block.groups = static_cast<int>(k_count / args.fold);
    PrefetchGroups(args, block.group + block.groups, block.groups);
    if (args.group_scale_form == GroupScaleForm::kF32) {
      block.scales = Pairs::Scales(args, block.group, scales);
    } else {
      for (int g = 0; g < block.groups; ++g)
        Pairs::Scales(args, block.group + g, scales + g * kPanelColumns);
    }
    if (HWY_UNLIKELY(!pairs.Begin(args, block.group, 0)))
      return GroupedBlocks<typename Pairs::AnyScale>(args);
    const std::byte* units = w;
    w += k_count / Pairs::kSteps * Pairs::kBytes;
    // The decoding tile is as high as the others, or four rows where decoding is quick: a high one
    // would wait for its stores.
    const int even = (args.num_rows + 5) / 6;
    const int first = Pairs::kByPairs ? 4 : (args.num_rows + even - 1) / even;
    const int rest = args.num_rows - first;
    const int tiles = 1 + (rest + 5) / 6;
    block.row = 0;
    // Each tile asks for its share of the next groups: decoding them would wait for memory.
    const auto lines = static_cast<int>(k_count / Pairs::kSteps * (Pairs::kBytes / 64));
    for (int i = 0; i < tiles; ++i) {
      const int height = i == 0 ? first : rest / (tiles - 1) + (i - 1 < rest % (tiles - 1) ? 1 : 0);
      for (int line = lines * i / tiles; line < lines * (i + 1) / tiles; ++line)
        __builtin_prefetch(w + 64 * line, 0, 2);
      if (i == 0) {
        kGroupedTiles<Pairs>[height](args, block, pairs, units, w);
      } else if (of16) {
        kTilesOf16[height](args, block);
      } else {
        kGroupedTiles<PairsDecoded>[height](args, block, PairsDecoded{}, nullptr, nullptr);
      }
      block.row += height;
    }
  }
}

template <class Pairs>
void GroupedGemmPair(const PanelArgs& args) {
  switch (args.num_rows) {
    case 1:
      return GroupedStream<Pairs, 1, Pairs::kGroupsAtOnce>(args);
    case 2:
      return GroupedStream<Pairs, 2, 1>(args);
    case 3:
      return GroupedDirect<Pairs, 3>(args);
    case 4:
      return GroupedDirect<Pairs, 4>(args);
    case 5:
      return GroupedDirect<Pairs, 5>(args);
    case 6:
      return GroupedDirect<Pairs, 6>(args);
    default:
      return GroupedBlocks<Pairs>(args);
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
