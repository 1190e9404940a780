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
  HWY_INLINE void Begin(const PanelArgs&, std::int64_t) {}
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[4]) const {
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
  HWY_INLINE void Begin(const PanelArgs&, std::int64_t) {}
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[2]) const {
    DecodePairs(tables, raw, pair[0], pair[1]);
  }
};

// Lower and upper byte of every int8 as bf16 (exact), non-negative codes first.
struct BytesI8 {
  alignas(64) std::uint8_t low[256];
  alignas(64) std::uint8_t high[256];
};
constexpr BytesI8 MakeBytesI8() {
  BytesI8 t{};
  for (int code = 0; code < 256; ++code) {
    const auto bits =
        std::bit_cast<std::uint32_t>(static_cast<float>(code < 128 ? code : code - 256));
    t.low[code] = static_cast<std::uint8_t>(bits >> 16 & 0xFFU);
    t.high[code] = static_cast<std::uint8_t>(bits >> 24);
  }
  return t;
}
constexpr BytesI8 kI8ToBF16 = MakeBytesI8();

// A byte permute looks at seven bits of its index: one table for each sign.
struct PairsI8 {
  static constexpr int kSteps = 4;
  __m512i low[4], high[4];
  explicit PairsI8(const PanelArgs&) {
    for (int i = 0; i < 4; ++i) {
      low[i] = _mm512_load_si512(kI8ToBF16.low + 64 * i);
      high[i] = _mm512_load_si512(kI8ToBF16.high + 64 * i);
    }
  }
  HWY_INLINE void Begin(const PanelArgs&, std::int64_t) {}
  HWY_INLINE void Decode(int, __m512i raw, __m512i (&pair)[2]) const {
    const __mmask64 negative = _mm512_movepi8_mask(raw);
    const __m512i lower =
        _mm512_mask_blend_epi8(negative, _mm512_permutex2var_epi8(low[0], raw, low[1]),
                               _mm512_permutex2var_epi8(low[2], raw, low[3]));
    const __m512i upper =
        _mm512_mask_blend_epi8(negative, _mm512_permutex2var_epi8(high[0], raw, high[1]),
                               _mm512_permutex2var_epi8(high[2], raw, high[3]));
    pair[0] = _mm512_unpacklo_epi8(lower, upper);
    pair[1] = _mm512_unpackhi_epi8(lower, upper);
  }
};

// int4 times an e4m3 scale, rounded to e4m3: a table of the eight products of each of the 64
// columns is put together for every group. One permute looks up 8 columns of 8 products; a vector
// has 16 columns.
struct PairsInt4Fp8 {
  static constexpr int kSteps = 8;
  const __m512i seven = _mm512_set1_epi16(7), fifteen = _mm512_set1_epi16(15),
                sign = _mm512_set1_epi16(static_cast<short>(0x8000));
  __m512i column;  // of each 16-bit lane, times 8
  alignas(64) std::uint16_t products[kPanelColumns * 8];
  explicit PairsInt4Fp8(const PanelArgs&) {
    alignas(64) std::uint16_t lanes[32];
    for (int i = 0; i < 32; ++i) lanes[i] = static_cast<std::uint16_t>(i / 2 % 8 * 8);
    column = _mm512_load_si512(lanes);
  }
  HWY_INLINE void Begin(const PanelArgs& args, std::int64_t group) {
    const auto* scales =
        reinterpret_cast<const std::uint8_t*>(args.group_scales) + group * kPanelColumns;
    for (int c = 0; c < kPanelColumns; ++c)
      std::memcpy(products + 8 * c, args.products->of[scales[c]], 16);
  }
  HWY_INLINE void Decode(int v, __m512i raw, __m512i (&pair)[4]) const {
    const std::uint16_t* t = products + v * 128;
    const __m512i t0 = _mm512_load_si512(t), t1 = _mm512_load_si512(t + 32);
    const __m512i t2 = _mm512_load_si512(t + 64), t3 = _mm512_load_si512(t + 96);
    pair[0] = Pair(raw, _mm512_slli_epi16(raw, 12), t0, t1, t2, t3);
    pair[1] = Pair(_mm512_srli_epi16(raw, 4), _mm512_slli_epi16(raw, 8), t0, t1, t2, t3);
    pair[2] = Pair(_mm512_srli_epi16(raw, 8), _mm512_slli_epi16(raw, 4), t0, t1, t2, t3);
    pair[3] = Pair(_mm512_srli_epi16(raw, 12), raw, t0, t1, t2, t3);
  }
  // low: the code in bits 0..3, high: in bits 12..15
  HWY_INLINE __m512i Pair(__m512i low, __m512i high, __m512i t0, __m512i t1, __m512i t2,
                          __m512i t3) const {
    const __mmask32 some =
        _mm512_cmpneq_epi16_mask(_mm512_and_si512(low, fifteen), seven);        // 7 stands for zero
    const __m512i index = _mm512_ternarylogic_epi32(low, seven, column, 0xEA);  // low & 7 | column
    const __m512i left = _mm512_maskz_permutex2var_epi16(some & 0x0000FFFFU, t0, index, t1);
    const __m512i right = _mm512_maskz_permutex2var_epi16(some & 0xFFFF0000U, t2, index, t3);
    const __m512i value = _mm512_or_si512(left, right);
    return _mm512_ternarylogic_epi32(value, high, sign, 0x78);  // value ^ (high & sign)
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
      pairs.Decode(v, _mm512_load_si512(w + 64 * v), pair);
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
  Pairs pairs(args);
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
    pairs.Begin(args, group);
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
  Pairs pairs(args);
  HWY_ALIGN float buffer[kPanelColumns];
  ClearResult(args);
  const std::byte* w = args.panel;
  for (std::int64_t k0 = 0, group = 0; k0 < args.padded_k; k0 += args.fold, ++group) {
    VF acc[MR][4];
    PrefetchScales(args, group);
    pairs.Begin(args, group);
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
  Pairs pairs(args);
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
    pairs.Begin(args, block.group);  // formats with tables of a group have groups of 128
    for (std::int64_t k = 0; k < k_count; k += Pairs::kSteps, w += kUnitBytes) {
      PrefetchUnit(w + kStreamPrefetchBytes);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        __m512i pair[Pairs::kSteps / 2];
        pairs.Decode(v, _mm512_load_si512(w + 64 * v), pair);
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
