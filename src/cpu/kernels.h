// The CPU's inner mechanisms, one table of functions per instruction-set tier. Only mechanism:
// which rows meet which weights is decided by the stages above. Layout of packed weights:
// packed_weights.h.
//
// Symbols: a *panel* is 64 output columns over the whole reduction axis K; a *group* is 128 steps
// of K.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/checked.h"
#include "moesaic/activation.h"
#include "moesaic/dtype.h"
#include "moesaic/quant.h"
#include "quant/block_scales.h"

namespace moesaic::cpu {

// 64 columns = four 512-bit registers of fp32 accumulators, the width at which six rows fill the
// register file.
inline constexpr int kPanelColumns = 64;
// Partial sums are folded into the result every 128 steps: the scale granularity of block FP8, and
// a fixed reduction tree for everything else.
inline constexpr int kGroup = static_cast<int>(quant::kFp8BlockSize);
// Rows per call: the fp32 results of one panel (96 * 64 * 4 = 24 KiB) stay in a 32 KiB L1.
inline constexpr int kMaxRows = 192;

// Chains of multiply_add_loop: enough to cover the latency (4 to 6 cycles) of two multiply-adds a
// cycle with room for the scheduler, as the GEMMs have them; twelve fill the 16 registers of the
// smaller tiers.
constexpr int multiply_add_chains(int lanes) { return lanes == 16 ? 24 : 12; }
inline constexpr int kMaxMultiplyAddChains = 24;
inline constexpr int kMultiplyAddFloats = 16 * (kMaxMultiplyAddChains + 3);

// How activations are held as the left operand of a GEMM.
enum class OperandKind : std::uint8_t {
  kF32,   // fp32 values
  kBF16,  // bf16 values, for tiers with a bf16 dot product
  kI8,    // int8 codes in groups, for tiers with an 8-bit dot product: dot_row_bytes
};

// kCode4: 4-bit codes of any format, looked up in a table of 16 values.
// kInt4Fp8: int4 whose product with an e4m3 scale per column and group is rounded to e4m3.
// kI6: integers of 6 bits. kI8Quads, kI6Quads, kI4Quads, kE2M1Quads: integers of 8, 6 and 4 bits, and
// e2m1, as the 8-bit dot product reads them.
enum class WeightKind : std::uint8_t {
  kF32,
  kBF16,
  kF16,
  kE4M3,
  kCode4,
  kI8,
  kInt4Fp8,
  kI6,
  kI8Quads,
  kI6Quads,
  kI4Quads,
  kE2M1Quads
};
inline constexpr int kNumWeightKinds = 12;

// What the integer kernels expect to have been added to every code of kI8Quads, kI6Quads, kI4Quads (by
// flipping this bit of its two's complement): the instruction wants one side unsigned. Codes of
// kE2M1Quads lie as they are; a table makes them twice their value plus 16.
inline constexpr int kDotBias = 128, kDotBias6 = 32, kDotBias4 = 8, kE2M1Bias = 16;
// A row of k int8 codes for those kernels: per group of `fold` steps the int32 at which its sums
// start, -kDotBias times the sum of its codes, then the codes.
constexpr std::int64_t dot_row_bytes(std::int64_t k, std::int64_t fold) {
  return k / fold * (static_cast<std::int64_t>(sizeof(std::int32_t)) + fold);
}

// The values of 4-bit codes, exact in bf16.
struct CodeTable4 {
  alignas(64) std::uint16_t values[32];  // bf16 by code, twice
  alignas(16) std::uint8_t low[16];      // their lower and upper bytes
  alignas(16) std::uint8_t high[16];
};
CodeTable4 make_code_table(const std::array<float, 16>& values);

// kInt4Fp8, by scale code and two's complement code: e4m3(scale * int4) as bf16.
struct Int4Products {
  alignas(64) std::uint16_t of[256][16];
};
const Int4Products& int4_products();

// 16 steps of a row of e2m1 values with their scale, as the integer kernel reads them: codes are
// 2 * value + 12, every eight steps in the order 0 4 1 5 2 6 3 7; scale is a quarter of the e4m3
// scale, for both sides' factor 2.
inline constexpr int kE2M1GroupSteps = 16;
struct E2M1Group {
  std::uint8_t codes[kE2M1GroupSteps];
  float scale;
};

// Scales of super-blocks as the packed form has them; bytes of a panel: super_scales.h.
struct SuperScaleForm {
  int bits = 0;   // of their integers, 6 or 8; 0: not this form
  int group = 0;  // steps of a scale: 16 or 32
  bool minima = false;

  static constexpr std::int64_t kSteps = kSuperBlockColumns;
  std::int64_t groups() const { return kSteps / group; }
  std::int64_t planes() const { return groups() * bits / 8; }  // of scales, as many of minima
  std::int64_t block_bytes() const { return kPanelColumns * (minima ? 2 : 1) * (planes() + 2); }
  std::int64_t panel_bytes(std::int64_t padded_k) const {
    return ceil_div(padded_k, kSteps) * block_bytes();
  }
};

// How the scales of groups lie: F32, or what is exactly widened to it. kNone: all are 1.
enum class GroupScaleForm : std::uint8_t { kNone, kF32, kF16, kBF16, kE8M0, kE4M3 };
constexpr std::int64_t bytes_of(GroupScaleForm form) {
  if (form == GroupScaleForm::kF32) return 4;
  return form == GroupScaleForm::kF16 || form == GroupScaleForm::kBF16 ? 2 : 1;
}

struct PanelArgs {
  const std::byte* panel = nullptr;     // one packed panel
  const float* panel_scales = nullptr;  // [groups][4], one per 16 columns; null: no scales
  // Grouped GEMMs only: scales of one column and `fold` steps, [padded_k / fold][64].
  const std::byte* group_scales = nullptr;
  GroupScaleForm group_scale_form = GroupScaleForm::kNone;
  int fold = kGroup;                     // 16, 32, 64 or 128; padded_k is a multiple
  const float* group_offsets = nullptr;  // [padded_k / fold][64], or null: 0
  // super_gemm_i8, in their place: compact scales and minima, and the bias of SuperScaleArgs.
  SuperScaleForm super;
  const std::byte* super_blocks = nullptr;
  float super_bias = 0;
  const float* const* row_sums = nullptr;    // with offsets: num_rows pointers to [padded_k / fold]
  int folds_per_row_scale = 1;               // groups that share a row's scale
  const Int4Products* products = nullptr;    // kInt4Fp8, with group_scales E4M3 and form kNone
  const CodeTable4* codes = nullptr;         // kCode4
  const void* const* rows = nullptr;         // num_rows left operands of padded_k elements
  const float* const* row_scales = nullptr;  // num_rows pointers to [groups]; null: 1
  int num_rows = 0;                          // 1..kMaxRows
  std::int64_t padded_k = 0;  // multiple of 4; zero-filled beyond the true K on both sides
  bool accumulate = false;    // grouped GEMMs: result is the sum of the groups before these
  float* result = nullptr;    // [num_rows][64], overwritten
};

// Those of some steps of a panel, from a super-block's first on, and where they go as F32.
struct SuperScaleArgs {
  SuperScaleForm form;
  const std::byte* compact = nullptr;
  int per_scale = 1;         // groups of `fold` steps that share a scale
  float bias = 0;            // see pack_group_offsets
  std::int64_t groups = 0;   // of `fold` steps
  float* scales = nullptr;   // [groups][64]
  float* offsets = nullptr;  // [groups][64]: min - bias * scale (one rounding); null: none wanted
  // Codes that are asked of memory meanwhile: lines of 64 bytes.
  const std::byte* fetch = nullptr;
  std::int64_t fetch_lines = 0;
};

// c: gate columns 0..31 and up columns 32..63 (gated), or 64 plain columns; see activate().
struct ActivateArgs {
  const float* c = nullptr;  // [num_rows][64]
  int num_rows = 0;
  const float* bias = nullptr;  // [64] in the order of c, or null
  ActivationSpec activation;
  // For kinds without a vector form (in [width or 2*width], out [width]); lives on a level above
  // this one.
  void (*scalar_activation)(const ActivationSpec&, GateUpLayout, const float* in, float* out,
                            std::int64_t width) = nullptr;
  float* out = nullptr;  // [num_rows] rows of 32 (gated) or 64 values, row stride out_stride
  std::int64_t out_stride = 0;
};

// The gate's matrices: rows of `x` and `weight` hold hidden_size contiguous elements of F32, BF16 or
// F16, not necessarily aligned.
struct GateOperands {
  const std::byte* x = nullptr;  // [M, H]
  DType x_dtype = DType::kF32;
  std::int64_t x_row_bytes = 0;       // distance of rows of x
  const std::byte* weight = nullptr;  // [E, H] contiguous
  DType weight_dtype = DType::kF32;
  std::int64_t hidden_size = 0;
};
// A rectangle of its [M, E] logits and where they go: token t and expert e to
// logits[(t - first_token) * logits_stride + (e - first_expert)].
struct GateBlock {
  std::int64_t first_token = 0, end_token = 0;
  std::int64_t first_expert = 0, end_expert = 0;
  float* logits = nullptr;
  std::int64_t logits_stride = 0;
};

// How a row of activations becomes codes; the rules are those of experts/reference/operand.h.
enum class RowQuantRule : std::uint8_t {
  kNone,
  kFp8Group,      // e4m3 per group; of 128 columns, F32 or power-of-two: quantize_row_e4m3
  kFp8GroupPow2,  // power-of-two scales in place, for quantize_row
  kMxfp8,         // e4m3 per 32
  kMxfp4,         // e2m1 per 32
  kNvfp4,         // e2m1 per 16, static global scale
  kFp8Token,      // e4m3, one scale for the row
  kFp8Static,     // e4m3, one scale for everything; writes no scales
  kInt8,          // int8, one scale for the row, or for the group that is given as one
};

// One entry per weight kind, by name; null where there is none.
template <class Function>
struct ByWeightKind {
  Function of[kNumWeightKinds];
  constexpr Function& operator[](WeightKind kind) { return of[static_cast<int>(kind)]; }
  constexpr Function operator[](WeightKind kind) const { return of[static_cast<int>(kind)]; }
};
using PanelGemm = void (*)(const PanelArgs& args);

// What super_gemm_i8 has kernels for, in groups of `fold` steps.
inline constexpr int kSuperGemmRows = 6;
constexpr bool super_gemm_takes(WeightKind kind, const SuperScaleForm& form, std::int64_t fold) {
  if (form.group != fold) return false;
  if (kind == WeightKind::kI6Quads) return form.bits == 8 && fold == 16 && !form.minima;
  return kind == WeightKind::kI4Quads && form.bits == 6 && fold == 32 && form.minima;
}

struct CpuKernels {
  const char* name;            // tier: "baseline", "avx2", "avx512", "avx512_bf16", "amx", "neon"
  OperandKind narrow_operand;  // operand of schemes whose activations are exact in bf16
  // Rows of experts that a call handles at a time. The quicker the products, the more rows must
  // share a read of the weights.
  std::int64_t chunk_rows;
  // Rows of a GEMM at most (kMaxRows or fewer). All of a GEMM's rows share a read of its panel.
  int rows_per_call;
  // Rows of bf16, and of kI8Quads without scales, one behind the other and not a multiple of 1024
  // bytes apart, are read where they lie; others are copied for every panel.
  bool reads_spaced_rows;

  // result[r][c] = sum over groups g, ascending, of row_scale[r][g] * panel_scale[g][c/16] * (sum
  // over k in g, ascending, of row[r][k] * w[k][c]), each inner product accumulated in fp32 (in
  // bf16 pairs where the operand is kBF16; tier amx: panel_gemm_tiles-inl.h, also fewer folds where
  // there are no scales), each group folded with one fused multiply-add. The bits
  // of a row depend on nothing but that row. Null for kCode4 and kI8, which are grouped.
  ByWeightKind<PanelGemm> panel_gemm_f32;
  // Left operands are bf16; null for kF32 and kF16 weights and on tiers without a bf16 dot product.
  ByWeightKind<PanelGemm> panel_gemm_bf16;
  // The same with groups of `fold` steps, group_scale[g][c] in the place of panel_scale, and what
  // the offsets take away: result -= group_offset[g][c] * row_sum[r][g]. For kE4M3, kCode4, kI8, kI6
  // (whose bits are those of kI8) and kInt4Fp8.
  ByWeightKind<PanelGemm> grouped_gemm_f32;
  ByWeightKind<PanelGemm> grouped_gemm_bf16;
  // kI8Quads, kI6Quads, kI4Quads, kE2M1Quads: the bits of grouped_gemm_f32[kI8] and, with a table of
  // integers or of e2m1 values, [kCode4] for weights packed so with the bias flipped (PackedShape::code_flip) and rows of int8 codes
  // (dot_row_bytes), on the 8-bit integer dot product: a group's sum is an exact integer either way
  // (tier amx without scales: sums of 1024 steps, hence other bits beyond 2^24).
  // Tiers avx2 and avx512 do it with sums of byte pairs where the machine has no such instruction
  // (AVX-VNNI, AVX512_VNNI); null on tiers baseline, and neon without I8MM, and then store_i8 is too.
  ByWeightKind<PanelGemm> grouped_gemm_i8;
  // The bits of grouped_gemm_i8 for at most kSuperGemmRows rows, with scales in the compact form of
  // super-blocks, all of K: super_gemm_takes. Null where grouped_gemm_i8 is.
  ByWeightKind<PanelGemm> super_gemm_i8;
  // The bits of grouped_gemm_bf16[kCode4] for e2m1 codes with E4M3 scales of 16 steps, without
  // offsets, where rows are pointers to E2M1Group [padded_k / 16], which hold the rows' scales
  // (row_scales is not read); for many rows. Null on tiers without an 8-bit dot product.
  void (*grouped_gemm_e2m1)(const PanelArgs& args);
  // Scales and offsets of some steps of a panel from their compact form, for the grouped GEMMs, and for
  // how many steps at a time: the kernel, called for these and then the next ones (accumulate), should
  // find them in L1.
  void (*expand_super_scales)(const SuperScaleArgs& args);
  std::int64_t super_scale_steps;
  // result[r][c] *= (rows ? rows[r] * columns[c] : columns[c]), the product of the factors first.
  void (*scale_result)(float* result, int num_rows, const float* columns, const float* const* rows);

  // Logits x[t] . weight[e] of a rectangle. Each is the sum over lanes of lane-wise fp32
  // accumulations in ascending order, with the last partial vector padded by zeros: its bits depend
  // on the two rows and on the tier's vector width only, not on the rectangle. Error: at most
  // H * 2^-24 * sum|x*w|.
  void (*gate_logits)(const GateOperands& operands, const GateBlock& block);

  // Bias and activation in fp32.
  void (*activate)(const ActivateArgs& args);

  // n elements of F32, BF16 or F16 widened to fp32; padded with zeros up to padded_n.
  void (*load_row)(const void* src, DType dtype, std::int64_t n, std::int64_t padded_n, float* dst);
  // Rounds in place to the values of BF16 or F16 (nearest even); F32 is a no-op.
  void (*round_row)(float* row, std::int64_t n, DType dtype);
  void (*scale_row)(float* row, std::int64_t n, float factor);
  // The row rounded to round_dtype (F32: as it is), then per group of 128: scale = max(absmax,
  // 1e-10) / 448, or that rounded up to a power of two (at least 1e-10); dst [n] becomes the values
  // of the e4m3 codes of clamp(x / scale), as elements of narrow_operand. A NaN or infinity makes
  // its group's scale so. dst may be row.
  void (*quantize_row_e4m3)(const float* row, std::int64_t n, DType round_dtype, bool power_of_two,
                            float* scales, void* dst);
  // Every rule in place: row becomes the values of the codes, scales one per group or row. group:
  // columns that share a scale with kFp8Group (F32 scales here) and kFp8GroupPow2.
  // static_scale: the input scale of kNvfp4 and kFp8Static. scales null: the values come out
  // multiplied by them, exact in bf16 where scales are powers of two or codes and scales have few
  // bits (kFp8GroupPow2, kMxfp8, kMxfp4, kNvfp4).
  void (*quantize_row)(RowQuantRule rule, std::int64_t group, float static_scale, float* row,
                       std::int64_t n, float* scales);
  // sums[g] = sum of row[g * step ..], ceil(n / step) of them.
  void (*group_sums)(const float* row, std::int64_t n, std::int64_t step, float* sums);
  // fp32 values that are exact in bf16 -> bf16.
  void (*store_bf16)(const float* row, std::int64_t n, std::uint16_t* dst);
  // Values of int8 codes, n (a multiple of fold) of them -> a row of grouped_gemm_i8's kernels.
  void (*store_i8)(const float* row, std::int64_t n, int fold, void* dst);
  // Values of e2m1 codes, n (a multiple of 16) of them, and a scale per 16 -> the groups of
  // grouped_gemm_e2m1; row is multiplied by the scales. Null where that is.
  void (*store_e2m1)(float* row, std::int64_t n, const float* scales, E2M1Group* dst);
  // The result of a panel, [num_rows][64], to rows of `out`, `stride` apart, both aligned to 64
  // bytes. past_caches: straight to memory, for what is not read again soon.
  void (*store_panel)(const float* result, int num_rows, bool past_caches, float* out,
                      std::int64_t stride);
  // dst[i] += weight * src[i], fused.
  void (*accumulate_row)(const float* src, float weight, std::int64_t n, float* dst);
  // fp32 -> F32, BF16 or F16, nearest even.
  void (*store_row)(const float* row, std::int64_t n, DType dtype, void* dst);

  // For measuring ceilings. Runs independent chains of the multiply-add that GEMMs with this
  // operand use, and returns the operations done (two per multiply-add); not for kI8.
  // operands: rows of 16, of which a tier uses the first lanes: kMaxMultiplyAddChains start
  // values, the first ones replaced by the results, then x0, x1 and y. Per iteration chain i
  // becomes, kF32: chain * x + y; kBF16: chain + x * y + x * y, of x and y their upper halves; x is
  // x0 for even i, else x1. Tier amx: five chains, rows of tiles; per eight iterations the sum over
  // 16 lanes of x times y is added to each lane of y (kBF16: twice).
  double (*multiply_add_loop)(OperandKind operand, std::int64_t iterations, float* operands);
  // The same for kI8, in int32: chain + the four products of x's unsigned and y's signed bytes (on
  // tier amx x's are signed and y's unsigned; of byte pairs two sums of two, in int16). Null where
  // grouped_gemm_i8 is.
  double (*multiply_add_loop_i8)(std::int64_t iterations, std::int32_t* operands);
  // Reads `bytes` (a multiple of 256) once, front to back; the exclusive or of all words.
  std::uint32_t (*read_loop)(const std::byte* data, std::int64_t bytes);
};

}  // namespace moesaic::cpu
