// Formats whose activations are quantised, or whose weights have scales that are exact in bf16, and
// bf16.
#include <fmt/format.h>

#include "core/refusal.h"
#include "experts/sm90/format_rows.h"
#include "experts/sm90/formats/bf16.h"
#include "experts/sm90/formats/f16.h"
#include "experts/sm90/formats/fp8_block.h"
#include "experts/sm90/formats/fp8_row.h"
#include "experts/sm90/formats/int4_fp8.h"
#include "experts/sm90/formats/int8.h"
#include "experts/sm90/formats/mxfp4_bf16.h"
#include "experts/sm90/formats/mxfp8.h"
#include "experts/sm90/formats/nvfp4.h"
#include "experts/sm90/repack_codes.h"
#include "quant/operand_forms.h"

namespace moesaic::cuda {

// Generated from the list in CMakeLists.txt.
LaunchGrouped launch_grouped_bf16_swiglu, launch_grouped_bf16_any, launch_grouped_bf16_relu2;
LaunchGrouped launch_grouped_f16_swiglu, launch_grouped_f16_any;
LaunchGrouped launch_grouped_fp8_block_relu2, launch_grouped_fp8_block_swiglu,
    launch_grouped_fp8_block_any;
LaunchGrouped launch_grouped_fp8_row_relu2, launch_grouped_fp8_row_swiglu,
    launch_grouped_fp8_row_any;
LaunchGrouped launch_grouped_nvfp4_relu2, launch_grouped_nvfp4_swiglu, launch_grouped_nvfp4_any;
LaunchGrouped launch_grouped_int8_swiglu, launch_grouped_int8_any;
LaunchGrouped launch_grouped_mxfp4_bf16_swiglu, launch_grouped_mxfp4_bf16_any;
LaunchGrouped launch_grouped_int4_fp8_swiglu, launch_grouped_int4_fp8_any;
LaunchGrouped launch_grouped_mxfp8_swiglu, launch_grouped_mxfp8_any;

namespace {

// |sum| of an int8 product is at most 2^14 K.
Status check_int8(const MoeProblem& problem) {
  constexpr std::int64_t kMost = 131071;
  for (const auto& [name, value] : {std::pair{"hidden_size", problem.hidden_size},
                                    std::pair{"intermediate_size", problem.intermediate_size}}) {
    if (value > kMost) {
      return unsupported(fmt::format("{}: got {}, need at most {} with int8", name, value, kMost));
    }
  }
  return check_widths<16>(problem);
}

// Of values that are multiplied as they are stored.
template <class Format>
constexpr FormatRow plain_row(ComputeScheme scheme) {
  FormatRow row = row_of<Format>(scheme);
  row.inner_multiple = 8;
  // Items are twice as long as in fp8: two of them per pair of CTAs still gain (Qwen3-235B: about
  // 4 %). Sharing weights pays where experts have two groups and the kernel waits for memory
  // traffic: up to 9 %.
  row.tiles = {.split_items = 2, .paired_rows = 96};
  row.parts = kImages;
  row.check = &check_widths<8>;
  row.repack = MOESAIC_ON_DEVICE(repack_tiles);
  return row;
}

constexpr FormatRow f16_row() {
  FormatRow row = plain_row<F16>(ComputeScheme::kF16);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_f16_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_f16_any)};
  return row;
}

constexpr FormatRow bf16_row() {
  FormatRow row = plain_row<Bf16>(ComputeScheme::kBF16);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_bf16_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_bf16_any)};
  return with_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_bf16_relu2));
}

constexpr FormatRow fp8_block_row() {
  FormatRow row = row_of<Fp8Block>(ComputeScheme::kFp8Block);
  row.inner_multiple = 128;
  // Past one item per pair of CTAs whole bands are as fast (Qwen3-235B) or faster (3 to 6 % at 2 to
  // 16 tokens). The kernel waits for its consumers, so sharing weights is slower.
  row.tiles = {.split_items = 1, .paired_rows = 0, .snug = 136};
  row.parts = kImagesAndBlockScales;
  row.check = &check_widths<128>;
  row.repack = MOESAIC_ON_DEVICE(repack_tiles);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_fp8_block_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_fp8_block_any)};
  return with_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_fp8_block_relu2));
}

// Both formats whose rows have one scale: built as fp8-block is, and timed with its rules.
template <class Format>
constexpr FormatRow row_scaled(ComputeScheme scheme, int snug) {
  FormatRow row = row_of<Format>(scheme);
  row.tiles = {.split_items = 1, .paired_rows = 0, .snug = snug};
  row.parts = kImagesAndRowScales;
  row.repack = MOESAIC_ON_DEVICE(repack_row_scaled);
  return row;
}

constexpr FormatRow fp8_scaled_row() {
  FormatRow row = row_scaled<Fp8Row>(ComputeScheme::kFp8Scaled, 136);
  row.check = &check_widths<16>;
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_fp8_row_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_fp8_row_any)};
  return with_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_fp8_row_relu2));
}

constexpr FormatRow int8_row() {
  FormatRow row = row_scaled<Int8>(ComputeScheme::kInt8, 144);
  row.check = &check_int8;
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_int8_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_int8_any)};
  return row;
}

bool is_mxfp8_weight(const OperandQuant& w) {
  using namespace quant::forms;
  return is_bare(w) && is_group(w, kE4M3, F::kE8M0, quant::kMxGroupSize);
}
bool is_nvfp4_weight(const OperandQuant& w) {
  using namespace quant::forms;
  return is_bare(w) && w.dtype == kE2M1 && w.scale_format == F::kE4M3;
}

// Formats whose codes are decoded in registers: the weights' kernel with operand rows of `rows`.
template <class Format>
constexpr FormatRow decoded(ComputeScheme scheme, RowForm rows, int widest) {
  FormatRow row = row_of<Format>(scheme);
  row.rows = rows;
  row.tiles = decoded_tiles(widest);
  row.parts = kImagesAndRowScales;
  return row;
}

constexpr FormatRow mxfp4_row(ComputeScheme scheme, RowForm rows) {
  FormatRow row = decoded<Mxfp4Bf16>(scheme, rows, 144);
  row.check = &check_widths<32>;
  row.repack = MOESAIC_ON_DEVICE(repack_mxfp4);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_mxfp4_bf16_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_mxfp4_bf16_any)};
  return row;
}

// Operand rows are values in bf16, which has no room for scales that are no powers of two.
Status check_mxfp4_fp8(const MoeProblem& problem) {
  const OperandQuant& a = problem.quant.activation;
  if (a.granularity != ScaleGranularity::kGroup || a.scale_format != ScaleFormat::kE8M0) {
    return unsupported(fmt::format("activation of mxfp4-fp8: got {}, need {} on a GPU",
                                   activation_text(problem.quant),
                                   "F8_E4M3, a power of two per 128 columns"));
  }
  return check_widths<32>(problem);
}

constexpr FormatRow mxfp4_fp8_row() {
  FormatRow row = mxfp4_row(ComputeScheme::kMxfp4Fp8, RowForm::kFp8Values);
  row.check = &check_mxfp4_fp8;
  row.tiles.split_items = 0;  // a group of 128 channels may be both halves of a band
  return row;
}

constexpr FormatRow mxfp8_row(ComputeScheme scheme, RowForm rows) {
  FormatRow row = decoded<Mxfp8>(scheme, rows, 144);
  row.check = &check_widths<32>;
  row.repack = MOESAIC_ON_DEVICE(repack_mxfp8);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_mxfp8_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_mxfp8_any)};
  return row;
}

// The image has one scale per row and chunk.
Status check_int4_fp8(const MoeProblem& problem) {
  const std::int64_t group = problem.quant.weight.block_k;
  if (group % 128 == 0) return {};
  return unsupported(fmt::format(
      "groups of int4-fp8 weights: got {} columns, need a multiple of 128 on a GPU", group));
}

constexpr FormatRow int4_fp8_row() {
  // 144 columns: too few registers, slower.
  FormatRow row = decoded<Int4Fp8>(ComputeScheme::kInt4Fp8, RowForm::kFp8Row, 136);
  row.tiles.narrow_rows = 8;  // one warpgroup per slab
  row.check = &check_int4_fp8;
  row.repack = MOESAIC_ON_DEVICE(repack_int4_fp8);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_int4_fp8_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_int4_fp8_any)};
  return row;
}

constexpr FormatRow nvfp4_row(ComputeScheme scheme, RowForm rows) {
  FormatRow row = decoded<Nvfp4>(scheme, rows, 160);
  row.check = &check_widths<16>;
  row.repack = MOESAIC_ON_DEVICE(repack_nvfp4);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_nvfp4_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_nvfp4_any)};
  return with_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_nvfp4_relu2));
}

// Of the scheme of all weights whose activations are bf16.
constexpr FormatRow weight_only(FormatRow row, std::string_view name,
                                bool (*takes)(const OperandQuant& weight)) {
  row.name = name;
  row.takes = takes;
  return row;
}

constexpr FormatRow kSchemes[] = {bf16_row(),
                                  f16_row(),
                                  fp8_block_row(),
                                  mxfp4_row(ComputeScheme::kMxfp4Bf16, RowForm::kBf16),
                                  fp8_scaled_row(),
                                  int8_row(),
                                  mxfp8_row(ComputeScheme::kMxfp8, RowForm::kMx8Values),
                                  mxfp4_row(ComputeScheme::kMxfp4, RowForm::kMx4Values),
                                  mxfp4_fp8_row(),
                                  nvfp4_row(ComputeScheme::kNvfp4, RowForm::kNv4Values),
                                  int4_fp8_row(),
                                  weight_only(nvfp4_row(ComputeScheme::kWeightOnly, RowForm::kBf16),
                                              "nvfp4-bf16", &is_nvfp4_weight),
                                  weight_only(mxfp8_row(ComputeScheme::kWeightOnly, RowForm::kBf16),
                                              "mxfp8-bf16", &is_mxfp8_weight)};

}  // namespace

std::span<const FormatRow> formats_of_schemes() { return kSchemes; }

}  // namespace moesaic::cuda
