// Panel GEMM of e2m1 weights and e2m1 rows, both with e4m3 scales per 16 steps, for many rows: on
// the 8-bit integer dot product (AVX512_VNNI), four steps of k per lane and instruction.
//
// Twice an e2m1 value is an integer of at most 12, so a group's sum is an exact integer here and an
// exact fp32 number in the bf16 kernels, and the product of two e4m3 scales is exact: the fold adds
// the same real number, hence the bits are those of panel_gemm_grouped_bf16-inl.h.
//
// The instruction wants one side unsigned: rows hold 2 * value + 12 (E2M1Group), and every group's
// sum starts at -12 * (sum of the column's weights).
#if defined(MOESAIC_CPU_PANEL_GEMM_E2M1_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_PANEL_GEMM_E2M1_INL_H_
#undef MOESAIC_CPU_PANEL_GEMM_E2M1_INL_H_
#else
#define MOESAIC_CPU_PANEL_GEMM_E2M1_INL_H_
#endif

#include <cstring>

#include "cpu/panel_gemm_grouped_bf16-inl.h"
#include "numerics/codec.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

constexpr int kE2M1Groups = kGroup / kE2M1GroupSteps;  // per block
constexpr int kE2M1Quads = kE2M1GroupSteps / 4;        // dot products per group
constexpr std::int8_t kE2M1Bias = 12;

// 16 values of e2m1 codes and their scale per group -> the group as above; row becomes the values
// times their scales. n is a multiple of 16. Four steps of a dot product are in the order in which
// the nibbles of a unit of weights (packed_weights.cc) come out under a mask: 0 4 1 5, 2 6 3 7.
void StoreE2M1(float* row, std::int64_t n, const float* scales, E2M1Group* dst) {
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  const VF two = hn::Set(df, 2.0F), bias = hn::Set(df, static_cast<float>(kE2M1Bias));
  for (std::int64_t k = 0; k < n; k += kE2M1GroupSteps, ++scales, ++dst) {
    const VF v = hn::LoadU(df, row + k);
    const __m512i biased = _mm512_cvtps_epi32(hn::MulAdd(v, two, bias).raw);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst->codes),
                     _mm_shuffle_epi8(_mm512_cvtepi32_epi8(biased), order));
    dst->scale = *scales * 0.25F;
    hn::StoreU(hn::Mul(v, hn::Set(df, *scales)), df, row + k);
  }
}

// Decoded groups in L1.
struct E2M1Block {
  HWY_ALIGN std::int8_t weights[kE2M1Groups][kE2M1Quads][4 * kPanelColumns];  // 2 * value
  HWY_ALIGN std::int32_t start[kE2M1Groups][kPanelColumns];                   // of the sums
  HWY_ALIGN float scales[kE2M1Groups][kPanelColumns];
  std::int64_t group = 0;  // first group
  int groups = 0;
  int row = 0;
};

// One group of 16 steps: two units of four-bit codes.
HWY_INLINE void DecodeE2M1(__m512i table, std::int8_t away, const std::byte* w, int g,
                           E2M1Block& block) {
  const __m512i nibble = _mm512_set1_epi8(15), bias = _mm512_set1_epi8(away);
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int unit = 0; unit < 2; ++unit) {
      const __m512i raw = _mm512_load_si512(w + unit * kUnitBytes + 64 * v);
      const __m512i low = _mm512_shuffle_epi8(table, _mm512_and_si512(raw, nibble));
      const __m512i high =
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble));
      _mm512_store_si512(block.weights[g][2 * unit] + 64 * v, low);
      _mm512_store_si512(block.weights[g][2 * unit + 1] + 64 * v, high);
      sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, bias, low), bias, high);
    }
    _mm512_store_si512(block.start[g] + 16 * v, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
  }
}

// A block's groups for MR rows.
template <int MR>
HWY_NOINLINE void RunE2M1Tile(const PanelArgs& args, const E2M1Block& block) {
  const E2M1Group* a[MR];
  for (int r = 0; r < MR; ++r)
    a[r] = static_cast<const E2M1Group*>(args.rows[block.row + r]) + block.group;
  float* result = args.result + block.row * kPanelColumns;
  for (int g = 0; g < block.groups; ++g) {
    __asm__("" : "+r"(result));  // or an address for each of the 24 vectors is kept on the stack
    __m512i acc[MR][4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512i start = _mm512_load_si512(block.start[g] + 16 * v);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) acc[r][v] = start;
    }
#pragma GCC unroll 4
    for (int quad = 0; quad < kE2M1Quads; ++quad) {
      __m512i w[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) w[v] = _mm512_load_si512(block.weights[g][quad] + 64 * v);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        std::int32_t codes;
        std::memcpy(&codes, a[r][g].codes + 4 * quad, sizeof(codes));
        const __m512i x = _mm512_set1_epi32(codes);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], x, w[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512 scale = _mm512_load_ps(block.scales[g] + 16 * v);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        float* p = result + r * kPanelColumns + 16 * v;
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(a[r][g].scale));
        const __m512 sum = _mm512_cvtepi32_ps(acc[r][v]);
        _mm512_store_ps(p, _mm512_fmadd_ps(sum, factor, _mm512_load_ps(p)));
      }
    }
  }
}

using E2M1TileFn = void (*)(const PanelArgs&, const E2M1Block&);
constexpr E2M1TileFn kE2M1Tiles[7] = {nullptr,        RunE2M1Tile<1>, RunE2M1Tile<2>,
                                      RunE2M1Tile<3>, RunE2M1Tile<4>, RunE2M1Tile<5>,
                                      RunE2M1Tile<6>};

void GroupedGemmE2M1(const PanelArgs& args) {
  ClearResult(args);
  alignas(16) std::int8_t values[16];
  for (int code = 0; code < 16; ++code) {
    const float value = f32_from_bf16(args.codes->values[code]);
    values[code] = static_cast<std::int8_t>(value * 2.0F);
  }
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
  const std::int8_t away = MOESAIC_FAULT(cpu_e2m1_bias_kept) ? 0 : kE2M1Bias;
  E2M1Block block;
  const std::byte* w = args.panel;
  const std::int64_t groups = args.padded_k / kE2M1GroupSteps;
  const int tiles = (args.num_rows + 5) / 6;
  for (; block.group < groups; block.group += block.groups) {
    block.groups = static_cast<int>(HWY_MIN(std::int64_t{kE2M1Groups}, groups - block.group));
    PrefetchGroups(args, block.group + block.groups, block.groups);
    for (int g = 0; g < block.groups; ++g, w += 2 * kUnitBytes) {
      ExpandScales(args, block.group + g, block.scales[g]);
      DecodeE2M1(table, away, w, g, block);
    }
    block.row = 0;
    // Each tile asks for its share of the next groups: decoding them would wait for memory.
    const int lines = block.groups * (2 * static_cast<int>(kUnitBytes) / 64);
    for (int i = 0; i < tiles; ++i) {
      for (int line = lines * i / tiles; line < lines * (i + 1) / tiles; ++line)
        __builtin_prefetch(w + 64 * line, 0, 2);
      const int height = args.num_rows / tiles + (i < args.num_rows % tiles ? 1 : 0);
      kE2M1Tiles[height](args, block);
      block.row += height;
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
