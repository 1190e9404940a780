// Panel GEMM for e2m1 weights on the bf16 dot-product instruction: a nibble is the index of a table
// of bf16 values, and a permute of 16-bit lanes looks at the lowest bits of its index only, so that
// eight steps of sixteen columns take three shifts and four permutes. Every 32 steps are folded
// with the columns' powers of two. Regimes and prefetch distances as in panel_gemm_bf16-inl.h.

// e2m1 values as bf16, twice: bit 4 of an index belongs to the next nibble.
alignas(64) constexpr std::uint16_t kE2M1ToBF16[32] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
    0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
    0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

// 16 columns x 8 steps -> pairs of steps (0,1), (2,3), (4,5), (6,7).
HWY_INLINE void DecodePairsE2M1(__m512i table, __m512i raw, __m512i (&pair)[4]) {
  pair[0] = _mm512_permutexvar_epi16(raw, table);
  pair[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), table);
  pair[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), table);
  pair[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), table);
}

// 1 or 2 rows: decoded in registers, results in registers.
template <int MR>
HWY_NOINLINE void StreamE2M1(const PanelArgs& args) {
  const __m512i table = _mm512_load_si512(kE2M1ToBF16);
  HWY_ALIGN float scales[kPanelColumns];
  VF total[MR][4];
  ClearTile<MR>(total);
  const std::byte* w = args.panel;
  const std::uint8_t* exponents = args.panel_exponents;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += kMxSteps, exponents += kPanelColumns) {
    const std::uint16_t* a[MR];
    for (int r = 0; r < MR; ++r) a[r] = static_cast<const std::uint16_t*>(args.rows[r]) + k0;
    VF acc[MR][4];
    ClearTile<MR>(acc);
    __builtin_prefetch(exponents + kStreamPrefetchBytes / 16, 0, 2);
#pragma GCC unroll 4
    for (int k = 0; k < kMxSteps; k += 8, w += kUnitBytes) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line)
        __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair[4];
        DecodePairsE2M1(table, _mm512_load_si512(w + 64 * v), pair);
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step) {
#pragma GCC unroll 2
          for (int r = 0; r < MR; ++r) {
            acc[r][v].raw = DotPair(acc[r][v].raw, pair[step], BroadcastPair(a[r], k + 2 * step));
          }
        }
      }
    }
    ExpandExponents(exponents, scales);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const VF scale = hn::Load(df, scales + 16 * v);
#pragma GCC unroll 2
      for (int r = 0; r < MR; ++r) total[r][v] = hn::MulAdd(acc[r][v], scale, total[r][v]);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      hn::Store(total[r][v], df, args.result + r * kPanelColumns + 16 * v);
  }
}

// 3 to 6 rows: decoded in registers, results in memory.
template <int MR>
HWY_NOINLINE void DirectE2M1(const PanelArgs& args) {
  const __m512i table = _mm512_load_si512(kE2M1ToBF16);
  HWY_ALIGN float scales[kPanelColumns];
  ClearResult(args);
  const std::byte* w = args.panel;
  const std::uint8_t* exponents = args.panel_exponents;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += kMxSteps, exponents += kPanelColumns) {
    const std::uint16_t* a[MR];
    for (int r = 0; r < MR; ++r) a[r] = static_cast<const std::uint16_t*>(args.rows[r]) + k0;
    VF acc[MR][4];
    ClearTile<MR>(acc);
    __builtin_prefetch(exponents + kStreamPrefetchBytes / 16, 0, 2);
    for (int k = 0; k < kMxSteps; k += 8, w += kUnitBytes) {
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line)
        __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair[4];
        DecodePairsE2M1(table, _mm512_load_si512(w + 64 * v), pair);
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step) {
#pragma GCC unroll 6
          for (int r = 0; r < MR; ++r) {
            acc[r][v].raw = DotPair(acc[r][v].raw, pair[step], BroadcastPair(a[r], k + 2 * step));
          }
        }
      }
    }
    ExpandExponents(exponents, scales);
    FoldColumns<MR, 4>(acc, scales, args.result, 0);
  }
}

// 7 rows and more: up to 128 steps are decoded into L1, tiles of rows pass over them.
struct MxBlock {
  const std::uint32_t* w = nullptr;  // bf16 units
  const float* scales = nullptr;     // [groups][64]
  std::int64_t k0 = 0;               // first step
  int groups = 0;                    // of 32 steps
  int row = 0;
};

template <int MR>
HWY_NOINLINE void RunMxTile(const PanelArgs& args, const MxBlock& block) {
  const std::uint16_t* a[MR];
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const std::uint16_t*>(args.rows[block.row + r]) + block.k0;
  const auto* w = reinterpret_cast<const std::byte*>(block.w);
  float* result = args.result + block.row * kPanelColumns;
  for (int group = 0; group < block.groups; ++group) {
    VF acc[MR][4];
    ClearTile<MR>(acc);
    for (std::int64_t k = 0; k < kMxSteps; k += 2, w += kUnitBytes)
      StepBF16<MR>(w, a, k + group * kMxSteps, acc);
    FoldColumns<MR, 4>(acc, block.scales + group * kPanelColumns, result, 0);
  }
}

void PanelGemmPairE2M1(const PanelArgs& args) {
  if (args.num_rows == 1) return StreamE2M1<1>(args);
  if (args.num_rows == 2) return StreamE2M1<2>(args);
  if (args.num_rows == 3) return DirectE2M1<3>(args);
  if (args.num_rows == 4) return DirectE2M1<4>(args);
  if (args.num_rows == 5) return DirectE2M1<5>(args);
  if (args.num_rows == 6) return DirectE2M1<6>(args);
  constexpr void (*kTiles[7])(const PanelArgs&, const MxBlock&) = {
      nullptr, RunMxTile<1>, RunMxTile<2>, RunMxTile<3>, RunMxTile<4>, RunMxTile<5>, RunMxTile<6>};
  ClearResult(args);
  const __m512i table = _mm512_load_si512(kE2M1ToBF16);
  HWY_ALIGN std::uint32_t decoded[kGroup / 2 * kPanelColumns];  // 16 KiB, L1
  HWY_ALIGN float scales[kGroup / kMxSteps * kPanelColumns];
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0; k0 < args.padded_k; k0 += kGroup) {
    const auto k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    MxBlock block{decoded, scales, k0, static_cast<int>(k_count / kMxSteps), 0};
    for (int g = 0; g < block.groups; ++g) {
      ExpandExponents(args.panel_exponents + (k0 / kMxSteps + g) * kPanelColumns,
                      scales + g * kPanelColumns);
    }
    std::uint32_t* out = decoded;
    for (std::int64_t k = 0; k < k_count; k += 8, w += kUnitBytes, out += 4 * kPanelColumns) {
      PrefetchUnit(w + kStreamPrefetchBytes);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair[4];
        DecodePairsE2M1(table, _mm512_load_si512(w + 64 * v), pair);
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step)
          _mm512_store_si512(out + step * kPanelColumns + 16 * v, pair[step]);
      }
    }
    const int tiles = (args.num_rows + 5) / 6;
    for (int i = 0; i < tiles; ++i) {
      const int height = args.num_rows / tiles + (i < args.num_rows % tiles ? 1 : 0);
      kTiles[height](args, block);
      block.row += height;
    }
  }
}
