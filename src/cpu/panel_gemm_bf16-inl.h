// Panel GEMM on the bf16 dot-product instruction (AVX512_BF16 with AVX512_VBMI): two steps of k per
// lane and instruction. Products of bf16 values are exact in fp32; the instruction flushes
// subnormal inputs and results.

HWY_INLINE __m512 DotPair(__m512 acc, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}

// The bf16 pair at steps k, k+1 of a row, in every lane.
HWY_INLINE __m512i BroadcastPair(const std::uint16_t* row, std::int64_t k) {
  std::int32_t pair;
  std::memcpy(&pair, row + k, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

template <int MR>
HWY_INLINE void PairRows(const PanelArgs& args, int row, std::int64_t group,
                         const std::uint16_t* (&a)[MR]) {
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const std::uint16_t*>(args.rows[row + r]) + group * kGroup;
}

template <int MR>
HWY_INLINE void ClearTile(VF (&acc)[MR][4]) {
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) acc[r][v] = hn::Zero(df);
  }
}

template <int MR, bool kPrefetch>
struct PairTileBF16 {
  static HWY_NOINLINE void Run(const PanelArgs& args, const std::byte* w, int row,
                               std::int64_t group, std::int64_t k_count) {
    const std::uint16_t* a[MR];
    PairRows<MR>(args, row, group, a);
    VF acc[MR][4];
    ClearTile<MR>(acc);
    for (std::int64_t k = 0; k < k_count; k += 2, w += kUnitBytes) {
      if (kPrefetch) PrefetchUnit(w + kPrefetchBytes);
      __m512i wv[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) wv[v] = _mm512_load_si512(w + 64 * v);
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        const __m512i x = BroadcastPair(a[r], k);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) acc[r][v].raw = DotPair(acc[r][v].raw, wv[v], x);
      }
    }
    Fold<MR, 4>(acc, args, row, 0, group);
  }
};

// All 128 magnitudes of e4m3 as the high and the low byte of a bf16, each in two registers for a
// byte permute.
struct TablesE4M3 {
  __m512i high[2], low[2];
};

HWY_INLINE TablesE4M3 LoadTablesE4M3() {
  TablesE4M3 t;
  for (int i = 0; i < 2; ++i) {
    t.high[i] = _mm512_load_si512(kE4M3ToBF16.high + 64 * i);
    t.low[i] = _mm512_load_si512(kE4M3ToBF16.low + 64 * i);
  }
  return t;
}

// 64 codes (16 columns x 4 steps) -> bf16 pairs of steps (0,1) and (2,3).
HWY_INLINE void DecodePairs(const TablesE4M3& t, __m512i raw, __m512i& pair01, __m512i& pair23) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i low = _mm512_permutex2var_epi8(t.low[0], raw, t.low[1]);
  __m512i high = _mm512_permutex2var_epi8(t.high[0], raw, t.high[1]);
  high = _mm512_ternarylogic_epi32(high, raw, sign, 0xF8);  // high | (raw & sign)
  pair01 = _mm512_unpacklo_epi8(low, high);
  pair23 = _mm512_unpackhi_epi8(low, high);
}

template <int MR, bool kPrefetch>
struct PairTileE4M3 {
  static HWY_NOINLINE void Run(const PanelArgs& args, const std::byte* w, int row,
                               std::int64_t group, std::int64_t k_count) {
    const TablesE4M3 tables = LoadTablesE4M3();
    const std::uint16_t* a[MR];
    PairRows<MR>(args, row, group, a);
    VF acc[MR][4];
    ClearTile<MR>(acc);
    for (std::int64_t k = 0; k < k_count; k += 4, w += kUnitBytes) {
      if (kPrefetch) PrefetchUnit(w + kPrefetchBytes);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair01, pair23;
        DecodePairs(tables, _mm512_load_si512(w + 64 * v), pair01, pair23);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          acc[r][v].raw = DotPair(acc[r][v].raw, pair01, BroadcastPair(a[r], k));
          acc[r][v].raw = DotPair(acc[r][v].raw, pair23, BroadcastPair(a[r], k + 2));
        }
      }
    }
    Fold<MR, 4>(acc, args, row, 0, group);
  }
};

void PanelGemmPairBF16(const PanelArgs& args) {
  ClearResult(args);
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += kGroup, ++group) {
    const std::int64_t k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - k0);
    RowTiles<PairTileBF16, true>(args, w, group, k_count);
    w += k_count / 2 * kUnitBytes;
  }
}

void PanelGemmPairE4M3(const PanelArgs& args) { PanelGemmE4M3<PairTileE4M3, PairTileBF16>(args); }
