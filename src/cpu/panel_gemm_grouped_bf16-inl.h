// The grouped panel GEMM on the bf16 dot-product instruction. A format contributes "64 bytes to
// bf16 pairs of steps of 16 columns". Regimes and prefetch distances as in panel_gemm_bf16-inl.h:
//   1 or 2 rows    decoded in registers, results in registers; limited by memory
//   3 to 6 rows    decoded in registers, results in memory
//   7 and more     up to 128 steps decoded into L1, tiles of rows pass over them

// 4-bit codes: a nibble is the index of a table of bf16 values, and a permute of 16-bit lanes looks
// at the lowest bits of its index only (bit 4 belongs to the next nibble, so the table is there
// twice): eight steps of sixteen columns take three shifts and four permutes.
struct PairsCode4 {
  static constexpr int kSteps = 8;
  __m512i table;
  explicit PairsCode4(const PanelArgs& args) : table(_mm512_load_si512(args.codes->values)) {}
  HWY_INLINE void Decode(__m512i raw, __m512i (&pair)[4]) const {
    pair[0] = _mm512_permutexvar_epi16(raw, table);
    pair[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), table);
    pair[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), table);
    pair[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), table);
  }
};

struct PairsE4M3 {
  static constexpr int kSteps = 4;
  TablesE4M3 tables;
  explicit PairsE4M3(const PanelArgs&) : tables(LoadTablesE4M3()) {}
  HWY_INLINE void Decode(__m512i raw, __m512i (&pair)[2]) const {
    DecodePairs(tables, raw, pair[0], pair[1]);
  }
};

// Byte i of a quad's (k0,k1) half to the top of its 32-bit lane, sign-extended, to fp32, whose
// lower half is zero; two of those are a pair.
struct PairsI8 {
  static constexpr int kSteps = 4;
  __m512i top[4];
  explicit PairsI8(const PanelArgs&) {
    for (int step = 0; step < 4; ++step) {
      const int first = step / 2 * 8 + step % 2;
      top[step] = _mm512_broadcast_i32x4(_mm_setr_epi8(
          -1, -1, -1, static_cast<char>(first), -1, -1, -1, static_cast<char>(first + 2), -1, -1,
          -1, static_cast<char>(first + 4), -1, -1, -1, static_cast<char>(first + 6)));
    }
  }
  HWY_INLINE void Decode(__m512i raw, __m512i (&pair)[2]) const {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const __m512i even = Float(raw, 2 * p), odd = Float(raw, 2 * p + 1);
      pair[p] = _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
    }
  }
  HWY_INLINE __m512i Float(__m512i raw, int step) const {
    const __m512i x = _mm512_srai_epi32(_mm512_shuffle_epi8(raw, top[step]), 24);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(x));
  }
};

// acc = one group of args.fold steps, decoded in registers, for the first MR rows.
template <class Pairs, int MR>
HWY_INLINE void GroupInRegisters(const PanelArgs& args, const Pairs& pairs, std::int64_t k0,
                                 const std::byte* w, VF (&acc)[MR][4]) {
  const std::uint16_t* a[MR];
  for (int r = 0; r < MR; ++r) a[r] = static_cast<const std::uint16_t*>(args.rows[r]) + k0;
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) acc[r][v] = hn::Zero(df);
  }
  for (int k = 0; k < args.fold; k += Pairs::kSteps, w += kUnitBytes) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line)
      __builtin_prefetch(w + kStreamPrefetchBytes + 64 * line, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      __m512i pair[Pairs::kSteps / 2];
      pairs.Decode(_mm512_load_si512(w + 64 * v), pair);
#pragma GCC unroll 4
      for (int step = 0; step < Pairs::kSteps / 2; ++step) {
#pragma GCC unroll 6
        for (int r = 0; r < MR; ++r)
          acc[r][v].raw = DotPair(acc[r][v].raw, pair[step], BroadcastPair(a[r], k + 2 * step));
      }
    }
  }
}

// The scales are a second stream, a small fraction of the first.
HWY_INLINE void PrefetchScales(const PanelArgs& args, std::int64_t group) {
  if (args.group_scale_format == ScaleFormat::kNone) return;
  const std::int64_t bytes = kPanelColumns * (args.group_scale_format == ScaleFormat::kF32 ? 4 : 1);
  for (std::int64_t line = 0; line < bytes; line += 64)
    __builtin_prefetch(args.group_scales + (group + 4) * bytes + line, 0, 2);
}

template <class Pairs, int MR>
HWY_NOINLINE void GroupedStream(const PanelArgs& args) {
  const Pairs pairs(args);
  HWY_ALIGN float buffer[kPanelColumns];
  VF total[MR][4];
#pragma GCC unroll 2
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) total[r][v] = hn::Zero(df);
  }
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += args.fold, ++group) {
    VF acc[MR][4];
    PrefetchScales(args, group);
    GroupInRegisters<Pairs, MR>(args, pairs, k0, w, acc);
    w += args.fold / Pairs::kSteps * kUnitBytes;
    const float* scales = ExpandScales(args, group, buffer);
    const GroupFold fold(args, group);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const VF scale = hn::LoadU(df, scales + 16 * v);
#pragma GCC unroll 2
      for (int r = 0; r < MR; ++r)
        total[r][v] = fold.Into(total[r][v], acc[r][v], scale, r, 16 * v);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      hn::Store(total[r][v], df, args.result + r * kPanelColumns + 16 * v);
  }
}

template <class Pairs, int MR>
HWY_NOINLINE void GroupedDirect(const PanelArgs& args) {
  const Pairs pairs(args);
  HWY_ALIGN float buffer[kPanelColumns];
  ClearResult(args);
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += args.fold, ++group) {
    VF acc[MR][4];
    PrefetchScales(args, group);
    GroupInRegisters<Pairs, MR>(args, pairs, k0, w, acc);
    w += args.fold / Pairs::kSteps * kUnitBytes;
    FoldColumns<MR, 4>(args, acc, ExpandScales(args, group, buffer), group, 0, 0);
  }
}

// Decoded groups in L1.
struct GroupedBlock {
  const std::uint32_t* w = nullptr;  // bf16 units
  const float* scales = nullptr;     // [groups][64]
  std::int64_t k0 = 0;               // first step
  std::int64_t group = 0;            // first group
  int groups = 0;
  int row = 0;
};

template <int MR>
HWY_NOINLINE void RunGroupedTile(const PanelArgs& args, const GroupedBlock& block) {
  const std::uint16_t* a[MR];
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const std::uint16_t*>(args.rows[block.row + r]) + block.k0;
  const auto* w = reinterpret_cast<const std::byte*>(block.w);
  for (int group = 0; group < block.groups; ++group) {
    VF acc[MR][4];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[r][v] = hn::Zero(df);
    }
    const std::int64_t first = group * args.fold;
    for (std::int64_t k = 0; k < args.fold; k += 2, w += kUnitBytes)
      StepBF16<MR>(w, a, first + k, acc);
    FoldColumns<MR, 4>(args, acc, block.scales + group * kPanelColumns, block.group + group,
                       block.row, 0);
  }
}

constexpr int kFinestFold = 16;

template <class Pairs>
HWY_NOINLINE void GroupedBlocks(const PanelArgs& args) {
  constexpr void (*kTiles[7])(const PanelArgs&, const GroupedBlock&) = {
      nullptr,           RunGroupedTile<1>, RunGroupedTile<2>, RunGroupedTile<3>,
      RunGroupedTile<4>, RunGroupedTile<5>, RunGroupedTile<6>};
  ClearResult(args);
  const Pairs pairs(args);
  HWY_ALIGN std::uint32_t decoded[kGroup / 2 * kPanelColumns];  // 16 KiB, L1
  HWY_ALIGN float scales[kGroup / kFinestFold * kPanelColumns];
  const std::byte* w = args.panel;
  GroupedBlock block;
  block.w = decoded;
  block.scales = scales;
  for (; block.k0 < args.padded_k; block.k0 += kGroup, block.group += block.groups) {
    const auto k_count = HWY_MIN(std::int64_t{kGroup}, args.padded_k - block.k0);
    block.groups = static_cast<int>(k_count / args.fold);
    for (int g = 0; g < block.groups; ++g) {
      float* to = scales + g * kPanelColumns;
      const float* from = ExpandScales(args, block.group + g, to);
      if (from != to) std::memcpy(to, from, kPanelColumns * sizeof(float));
    }
    std::uint32_t* out = decoded;
    for (std::int64_t k = 0; k < k_count; k += Pairs::kSteps, w += kUnitBytes) {
      PrefetchUnit(w + kStreamPrefetchBytes);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair[Pairs::kSteps / 2];
        pairs.Decode(_mm512_load_si512(w + 64 * v), pair);
#pragma GCC unroll 4
        for (int step = 0; step < Pairs::kSteps / 2; ++step)
          _mm512_store_si512(out + step * kPanelColumns + 16 * v, pair[step]);
      }
      out += Pairs::kSteps / 2 * kPanelColumns;
    }
    const int tiles = (args.num_rows + 5) / 6;
    block.row = 0;
    for (int i = 0; i < tiles; ++i) {
      const int height = args.num_rows / tiles + (i < args.num_rows % tiles ? 1 : 0);
      kTiles[height](args, block);
      block.row += height;
    }
  }
}

template <class Pairs>
void GroupedGemmPair(const PanelArgs& args) {
  switch (args.num_rows) {
    case 1:
      return GroupedStream<Pairs, 1>(args);
    case 2:
      return GroupedStream<Pairs, 2>(args);
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
