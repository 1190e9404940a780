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

// int4 times an e4m3 scale, rounded to e4m3. While scale and product are normal numbers below the
// largest, the rounding depends on the scale's mantissa alone: 8 mantissas x 16 codes fill a byte
// permute, and the scale's exponent comes off by a subtraction that leaves zero at zero.
struct ProductsE4M3 {
  alignas(64) std::uint8_t low[128];  // by mantissa * 16 + code, for a scale of exponent 15
  alignas(64) std::uint8_t high[128];
};
constexpr ProductsE4M3 MakeProductsE4M3() {
  ProductsE4M3 t{};
  for (int mantissa = 0; mantissa < 8; ++mantissa) {
    for (int code = 0; code < 16; ++code) {
      const int value = (code ^ 8) - 8;
      const int magnitude = (8 + mantissa) * (value < 0 ? -value : value);  // in units of 2^-3
      int top = 0;
      while ((magnitude >> top) > 15) ++top;  // four significant bits, ties to even
      const int rest = magnitude & ((1 << top) - 1), half = top > 0 ? 1 << (top - 1) : 1;
      int kept = magnitude >> top;
      if (top > 0 && (rest > half || (rest == half && kept % 2 != 0))) ++kept;
      const auto product = static_cast<float>(kept << top) * 0x1p5F;  // 2^-3 * 2^(15 - 7)
      const auto bits = std::bit_cast<std::uint32_t>(value < 0 ? -product : product);
      t.low[mantissa * 16 + code] = static_cast<std::uint8_t>(bits >> 16 & 0xFFU);
      t.high[mantissa * 16 + code] = static_cast<std::uint8_t>(bits >> 24);
    }
  }
  return t;
}
constexpr ProductsE4M3 kProductsE4M3 = MakeProductsE4M3();

struct PairsInt4Fp8 {
  static constexpr int kSteps = 8;
  __m512i low[2], high[2];
  alignas(64) std::uint8_t mantissa[4][64];   // of each byte's column, times 16
  alignas(64) std::uint32_t exponent[4][16];  // what comes off both halves of each column's pair
  const PanelArgs* args = nullptr;
  std::int64_t group = 0;
  bool usual = true;
  explicit PairsInt4Fp8(const PanelArgs&) {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(kProductsE4M3.low + 64 * i);
      high[i] = _mm512_load_si512(kProductsE4M3.high + 64 * i);
    }
  }
  HWY_INLINE void Begin(const PanelArgs& panel, std::int64_t g) {
    args = &panel;
    group = g;
    const auto* scales =
        reinterpret_cast<const std::uint8_t*>(panel.group_scales) + g * kPanelColumns;
    const __m512i all = _mm512_loadu_si512(scales);
    // 2^-6 (code 0x08) to 56 (0x66): no product is subnormal or above 448.
    usual = _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(all, _mm512_set1_epi8(0x08)),
                                   _mm512_set1_epi8(0x66 - 0x08)) == 0;
    // Bytes of a quad of columns: two steps of each, twice.
    const __m512i columns = _mm512_add_epi8(
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3)),
        _mm512_set_epi32(0x0C0C0C0C, 0x0C0C0C0C, 0x0C0C0C0C, 0x0C0C0C0C, 0x08080808, 0x08080808,
                         0x08080808, 0x08080808, 0x04040404, 0x04040404, 0x04040404, 0x04040404, 0,
                         0, 0, 0));
    for (int v = 0; v < 4; ++v) {
      const __m128i strip = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 16 * v));
      const __m512i spread = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(strip), columns);
      _mm512_store_si512(mantissa[v],
                         _mm512_slli_epi16(_mm512_and_si512(spread, _mm512_set1_epi8(7)), 4));
      const __m512i e = _mm512_srli_epi32(_mm512_cvtepu8_epi32(strip), 3);
      const __m512i off = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(15), e), 7);
      _mm512_store_si512(exponent[v], _mm512_or_si512(off, _mm512_slli_epi32(off, 16)));
    }
  }
  HWY_INLINE void Decode(int v, __m512i raw, __m512i (&pair)[4]) const {
    if (HWY_UNLIKELY(!usual)) return DecodeSlowly(v, raw, pair);
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i columns = _mm512_load_si512(mantissa[v]), off = _mm512_load_si512(exponent[v]);
    // code & 15 | mantissa
    Half(_mm512_ternarylogic_epi32(raw, nibble, columns, 0xEA), off, pair[0], pair[1]);
    Half(_mm512_ternarylogic_epi32(_mm512_srli_epi16(raw, 4), nibble, columns, 0xEA), off, pair[2],
         pair[3]);
  }
  HWY_INLINE void Half(__m512i index, __m512i off, __m512i& first, __m512i& second) const {
    const __m512i lower = _mm512_permutex2var_epi8(low[0], index, low[1]);
    const __m512i upper = _mm512_permutex2var_epi8(high[0], index, high[1]);
    // Saturating: the code of zero stays 0.
    first = _mm512_subs_epu16(_mm512_unpacklo_epi8(lower, upper), off);
    second = _mm512_subs_epu16(_mm512_unpackhi_epi8(lower, upper), off);
  }
  HWY_NOINLINE void DecodeSlowly(int v, __m512i raw, __m512i (&pair)[4]) const {
    alignas(64) std::byte unit[kUnitBytes];
    alignas(64) std::uint32_t out[4 * kPanelColumns];
    _mm512_store_si512(unit + 64 * v, raw);
    for (int c = 16 * v; c < 16 * v + 16; ++c)
      UnitInt4Fp8::DecodeColumn(*args, group, unit, c, out + c);
    for (int p = 0; p < 4; ++p) pair[p] = _mm512_load_si512(out + p * kPanelColumns + 16 * v);
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
        total[r][v] = fold.Into<false>(total[r][v], acc[r][v], scale, r, 16 * v);
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
    // Each tile asks for its share of the next groups: the decoding above would wait for memory.
    const auto lines = static_cast<int>(k_count / Pairs::kSteps * (kUnitBytes / 64));
    for (int i = 0; i < tiles; ++i) {
      const int height = args.num_rows / tiles + (i < args.num_rows % tiles ? 1 : 0);
      for (int line = lines * i / tiles; line < lines * (i + 1) / tiles; ++line)
        __builtin_prefetch(w + 64 * line, 0, 2);
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
