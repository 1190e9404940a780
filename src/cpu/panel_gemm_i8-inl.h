// The grouped panel GEMM for rows of int8 codes, on the 8-bit integer dot product (AVX-VNNI,
// AVX512_VNNI, I8MM; else byte pairs): four steps of k per lane. A group's sum is an exact integer below
// 2^24, as it is an exact number in the fp32 and bf16 kernels, and the fold is theirs: the bits are
// those of panel_gemm_grouped-inl.h.
//
// The instruction wants one side unsigned: weights lie with kDotBias (or kDotBias4) added, and every
// group's sum starts at minus that times the sum of the row's codes; the row holds what kDotBias
// makes it (StoreI8).
#if defined(MOESAIC_CPU_PANEL_GEMM_I8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_I8_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_I8_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_I8_INL_H_
#endif

#include <cstring>

#include "cpu/panel_tile_i8-inl.h"

#if MOESAIC_TIER_DOT8
MOESAIC_BEFORE_DOT8();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// A row of values of int8 codes (n a multiple of fold) to the groups that the GEMM below reads.
void StoreI8(const float* row, std::int64_t n, int fold, void* dst) {
  const hn::Rebind<std::int8_t, DF> di8;
  const int bias = MOESAIC_FAULT(cpu_i8_bias_kept) ? 0 : kDotBias;
  auto* out = static_cast<std::int8_t*>(dst);
  for (std::int64_t k = 0; k < n; k += fold, out += fold) {
    std::int8_t* codes = out + sizeof(std::int32_t);
    VI sum = hn::Zero(di32);
    for (int i = 0; i < fold; i += kLanes) {
      const VI v = hn::ConvertTo(di32, hn::LoadU(df, row + k + i));
      sum = hn::Add(sum, v);
      hn::StoreU(hn::DemoteTo(di8, v), di8, codes + i);
    }
    const std::int32_t start = -bias * hn::GetLane(hn::SumOfLanes(di32, sum));
    std::memcpy(out, &start, sizeof(start));
    out = codes;
  }
}

// All tiles of a block of `units` units that is in the cache; the first ones ask for the next
// `bytes` of weights, which their first tile would wait for.
template <class Unit>
HWY_INLINE void RunI8Tiles(const PanelArgs& args, std::int64_t units, std::int64_t bytes,
                           I8Block& block) {
  const int tiles = (args.num_rows + 5) / 6;
  const int each = tiles * units * 64 < bytes ? 2 : 1;  // lines per unit
  const std::byte* end = block.fetch + bytes;
  for (int i = 0; i < tiles; ++i) {
    const int height = args.num_rows / tiles + (i < args.num_rows % tiles ? 1 : 0);
    if (block.fetch >= end) {
      kI8Tiles<Unit, 0>[height](args, block);
    } else {
      (each == 2 ? kI8Tiles<Unit, 2> : kI8Tiles<Unit, 1>)[height](args, block);
      block.fetch += 64 * each * units;
    }
    block.row += height;
  }
}

// 128 steps at a time: 8 KiB of L1. Up to six rows read the units as they lie; more read quads,
// which codes of fewer than 8 bits are decoded to before.
template <class Unit>
void GroupedGemmI8(const PanelArgs& args) {
  using Decoded = typename Unit::Decoded;
  constexpr bool kDecodes = Unit::kSteps != Decoded::kSteps;
  ClearResult(args);
  HWY_ALIGN float scales[kMaxI8Groups * kPanelColumns];
  HWY_ALIGN std::byte quads[kDecodes ? kGroup * kPanelColumns : 64];
  const bool scaled = args.group_scale_form != GroupScaleForm::kNone;
  if (!scaled) ExpandScales(args, 0, scales);
  const std::byte* w = args.panel;
  I8Blocks blocks(args);
  while (blocks.Next(args)) {
    I8Block& block = blocks.block;
    const std::int64_t steps = std::int64_t{block.groups} * args.fold;
    const std::int64_t bytes = steps / Unit::kSteps * Unit::kBytes;
    PrefetchGroups(args, block.group + block.groups, block.groups);
    block.scales = scales;
    block.scale_step = scaled ? kPanelColumns : 0;
    if (args.group_scale_form == GroupScaleForm::kF32) {
      block.scales = ExpandScales(args, block.group, scales);
    } else if (scaled) {
      for (int g = 0; g < block.groups; ++g)
        ExpandScales(args, block.group + g, scales + g * kPanelColumns);
    }
    block.units = w;
    if (args.num_rows <= kFewI8Rows) {
      block.fetch = w + kPrefetchBytes;
      kI8Tiles<Unit, Unit::kBytes / 64>[args.num_rows](args, block);
    } else {
      if constexpr (kDecodes) {
        DecodeQuads<Unit>(w, bytes, quads);
        block.units = quads;
      }
      block.fetch = w + bytes;
      RunI8Tiles<Decoded>(args, steps / Decoded::kSteps, bytes, block);
    }
    w += bytes;
  }
}

// Up to kSuperGemmRows rows.
template <class Unit, class Scales>
void SuperGemmI8(const PanelArgs& args) {
  ClearResult(args);
  const std::byte* w = args.panel;
  const std::byte* super = args.super_blocks;
  const std::int64_t block_bytes = args.super.block_bytes();
  bool second = false;
  I8Blocks blocks(args);
  while (blocks.Next(args)) {
    I8Block& block = blocks.block;
    // Half of the scales of the next super-block.
    const std::byte* const ahead = super + block_bytes + (second ? block_bytes / 2 : 0);
    for (std::int64_t at = 0; at < block_bytes / 2; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    block.super = super;
    block.super_group = second ? kGroup / args.fold : 0;
    block.units = w;
    block.fetch = w + kSuperPrefetchBytes;
    kI8Tiles<Unit, Unit::kBytes / 64, Scales>[args.num_rows](args, block);
    w += std::int64_t{block.groups} * args.fold / Unit::kSteps * Unit::kBytes;
    if (second) super += block_bytes;
    second = !second;
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_DOT8();
#endif  // MOESAIC_TIER_DOT8

#endif  // per-target include guard
