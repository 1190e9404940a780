// Panel GEMM with fp32 left operands.
//
// A k-unit is 256 bytes: 64 columns of 4 bytes, each holding 1 fp32, 2 sixteen-bit or 4 eight-bit
// steps of k. So every format is read as one sequential stream, and a format contributes only
// "decode step s of these columns".
#if defined(MOESAIC_CPU_PANEL_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_INL_H_
#endif

#include "cpu/e4m3-inl.h"
#include "cpu/rows-inl.h"

MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

// Steps of k per unit and the fp32 value of step S for the columns at p.
struct DecodeF32 {
  static constexpr int kSteps = 1;
  template <int S>
  static HWY_INLINE VF Step(const std::byte* p) {
    return hn::Load(df, reinterpret_cast<const float*>(p));
  }
};

struct DecodeBF16 {
  static constexpr int kSteps = 2;
  template <int S>
  static HWY_INLINE VF Step(const std::byte* p) {
    const auto pair = hn::Load(du32, reinterpret_cast<const std::uint32_t*>(p));
    if constexpr (S == 0) {
      return hn::BitCast(df, hn::ShiftLeft<16>(pair));
    } else {
      return hn::BitCast(df, hn::And(pair, hn::Set(du32, 0xFFFF0000U)));
    }
  }
};

struct DecodeF16 {
  static constexpr int kSteps = 2;
  template <int S>
  static HWY_INLINE VF Step(const std::byte* p) {
    const auto pair = hn::Load(du32, reinterpret_cast<const std::uint32_t*>(p));
    const auto one = S == 0 ? hn::And(pair, hn::Set(du32, 0xFFFFU)) : hn::ShiftRight<16>(pair);
    return F16BitsToF32(one);
  }
};

// Vectors per register tile: 6 x 4 accumulators of 32 registers, or 6 x 2 of 16.
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
// Of MR rows: with few of them more columns, or each multiply-add would wait for the one before.
template <int MR>
constexpr int kVectorsOfRows = kTileVectors* HWY_MAX(1, (kLanes == 16 ? 1 : 4) / MR);
constexpr std::int64_t kUnitBytes = 4 * kPanelColumns;
// Far enough to cover the latency of memory at the speed of one core, inside the 4 KiB page of the
// next lines.
constexpr std::int64_t kPrefetchBytes = 4096;

// All four strips' factors of a row, left in memory: from there a multiply-add broadcasts one with
// its own load, where a scalar product would take a shuffle for each.
HWY_INLINE void StripScales(const PanelArgs& args, int row, std::int64_t group,
                            float (&scales)[4]) {
  const hn::FixedTag<float, 4> d4;
  auto strips = args.panel_scales != nullptr ? hn::LoadU(d4, args.panel_scales + group * 4)
                                             : hn::Set(d4, 1.0F);
  if (args.row_scales != nullptr)
    strips = hn::Mul(strips, hn::Set(d4, args.row_scales[row][group]));
  hn::Store(strips, d4, scales);
  __asm__("" : "+m"(scales));  // or the compiler extracts the lanes from the register
}

// result[r][column..] += scale * acc
template <int MR, int NV>
HWY_INLINE void Fold(const VF (&acc)[MR][NV], const PanelArgs& args, int row, int column,
                     std::int64_t group) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    alignas(16) float scales[4];
    StripScales(args, row + r, group, scales);
    float* c = args.result + static_cast<std::int64_t>(row + r) * kPanelColumns + column;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const VF scale = hn::Set(df, scales[(column + v * kLanes) / 16]);
      float* p = c + v * kLanes;
      hn::Store(hn::MulAdd(acc[r][v], scale, hn::Load(df, p)), df, p);
    }
  }
}

template <int MR, int NV>
HWY_INLINE void ClearTile(VF (&acc)[MR][NV]) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = hn::Zero(df);
  }
}

template <class Decode, int S, int MR, int NV>
HWY_INLINE void StepF32(const std::byte* p, const float* const (&a)[MR], std::int64_t k,
                        VF (&acc)[MR][NV]) {
  VF w[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) w[v] = Decode::template Step<S>(p + v * 4 * kLanes);
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    const VF x = hn::Set(df, a[r][k + S]);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = hn::MulAdd(w[v], x, acc[r][v]);
  }
}

// One group for MR rows starting at `row`; w is the group's first unit.
template <class Decode, int MR, bool kPrefetch>
HWY_NOINLINE void TileF32(const PanelArgs& args, const std::byte* w, int row, std::int64_t group,
                          std::int64_t k_count) {
  constexpr int kSteps = Decode::kSteps;
  const float* a[MR];
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const float*>(args.rows[row + r]) + group * kGroup;
  constexpr int kVectors = kVectorsOfRows<MR>;
  for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    VF acc[MR][kVectors];
    ClearTile<MR>(acc);
    const std::byte* p = w + column * 4;
    for (std::int64_t k = 0; k < k_count; k += kSteps, p += kUnitBytes) {
      if (kPrefetch && column == 0) PrefetchUnit(p + kPrefetchBytes);
      StepF32<Decode, 0, MR>(p, a, k, acc);
      if constexpr (kSteps > 1) StepF32<Decode, 1, MR>(p, a, k, acc);
      if constexpr (kSteps > 2) StepF32<Decode, 2, MR>(p, a, k, acc);
      if constexpr (kSteps > 3) StepF32<Decode, 3, MR>(p, a, k, acc);
    }
    Fold<MR, kVectors>(acc, args, row, column, group);
  }
}

// Splits the rows of a group into tiles of 6, 4, 2 and 1; the split does not change any row's bits.
template <template <int, bool> class Tile, bool kPrefetch>
HWY_INLINE void RowTiles(const PanelArgs& args, const std::byte* w, std::int64_t group,
                         std::int64_t k_count) {
  int row = 0;
  const auto left = [&] { return args.num_rows - row; };
  if (kPrefetch) {  // only the first tile fetches ahead, the rest finds the group in cache
    if (left() >= 6) {
      Tile<6, true>::Run(args, w, row, group, k_count), row += 6;
    } else if (left() >= 4) {
      Tile<4, true>::Run(args, w, row, group, k_count), row += 4;
    } else if (left() >= 2) {
      Tile<2, true>::Run(args, w, row, group, k_count), row += 2;
    } else {
      Tile<1, true>::Run(args, w, row, group, k_count), row += 1;
    }
  }
  for (; left() >= 6; row += 6) Tile<6, false>::Run(args, w, row, group, k_count);
  if (left() >= 4) Tile<4, false>::Run(args, w, row, group, k_count), row += 4;
  if (left() >= 2) Tile<2, false>::Run(args, w, row, group, k_count), row += 2;
  if (left() >= 1) Tile<1, false>::Run(args, w, row, group, k_count);
}

template <class Decode>
struct F32Tiles {
  template <int MR, bool kPrefetch>
  struct Tile {
    static HWY_INLINE void Run(const PanelArgs& args, const std::byte* w, int row,
                               std::int64_t group, std::int64_t k_count) {
      TileF32<Decode, MR, kPrefetch>(args, w, row, group, k_count);
    }
  };
};

// result[r][c] *= columns[c] * rows[r][0]
void ScaleResult(float* result, int num_rows, const float* columns, const float* const* rows) {
  for (int r = 0; r < num_rows; ++r, result += kPanelColumns) {
    for (int c = 0; c < kPanelColumns; c += kLanes) {
      VF factor = hn::LoadU(df, columns + c);
      if (rows != nullptr) factor = hn::Mul(hn::Set(df, rows[r][0]), factor);
      hn::Store(hn::Mul(hn::Load(df, result + c), factor), df, result + c);
    }
  }
}

HWY_INLINE void ClearResult(const PanelArgs& args) {
  if (args.accumulate) return;
  const std::int64_t n = static_cast<std::int64_t>(args.num_rows) * kPanelColumns;
  for (std::int64_t i = 0; i < n; i += kLanes) hn::Store(hn::Zero(df), df, args.result + i);
}

template <class Decode>
void PanelGemmF32(const PanelArgs& args) {
  ClearResult(args);
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += kGroup, ++group) {
    const std::int64_t k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    RowTiles<F32Tiles<Decode>::template Tile, true>(args, w, group, k_count);
    w += k_count / Decode::kSteps * kUnitBytes;
  }
}

// Decoding e4m3 costs more than one use of it; from this many rows on, a group is decoded once to
// (exact) bf16.
constexpr int kDecodeOnceRows = 3;

// 128 steps x 64 columns of e4m3 -> bf16 units in the layout of packed bf16 weights.
HWY_INLINE void DecodeGroupE4M3(const std::byte* w, std::int64_t k_count, std::uint32_t* block) {
  for (std::int64_t k = 0; k < k_count; k += 4, w += kUnitBytes, block += 2 * kPanelColumns) {
    PrefetchUnit(w + kPrefetchBytes);
    for (int c = 0; c < kPanelColumns; c += kLanes)
      DecodeColumnsE4M3(w + 4 * c, block + c, block + kPanelColumns + c);
  }
}

template <template <int, bool> class DirectTile, template <int, bool> class BlockTile>
HWY_INLINE void PanelGemmE4M3(const PanelArgs& args) {
  ClearResult(args);
  HWY_ALIGN std::uint32_t block[kGroup / 2 * kPanelColumns];  // 16 KiB, L1
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += kGroup, ++group) {
    const std::int64_t k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    if (args.num_rows >= kDecodeOnceRows) {
      DecodeGroupE4M3(w, k_count, block);
      RowTiles<BlockTile, false>(args, reinterpret_cast<const std::byte*>(block), group, k_count);
    } else {
      RowTiles<DirectTile, true>(args, w, group, k_count);
    }
    w += k_count / DecodeE4M3::kSteps * kUnitBytes;
  }
}

void PanelGemmF32E4M3(const PanelArgs& args) {
  PanelGemmE4M3<F32Tiles<DecodeE4M3>::template Tile, F32Tiles<DecodeBF16>::template Tile>(args);
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();

#endif  // per-target include guard
