#include "experts/sm90/formats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include "core/refusal.h"
#include "experts/padded_source.h"
#include "experts/sm90/experts_plan.h"
#include "experts/sm90/formats/bf16.h"
#include "experts/sm90/formats/fp8_bf16.h"
#include "experts/sm90/formats/fp8_block.h"
#include "experts/sm90/formats/fp8_row.h"
#include "experts/sm90/formats/int4_bf16.h"
#include "experts/sm90/formats/int4_fp8.h"
#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int4_narrow.h"
#include "experts/sm90/formats/int8.h"
#include "experts/sm90/formats/int8_bf16.h"
#include "experts/sm90/formats/int8_minima.h"
#include "experts/sm90/formats/int8_narrow.h"
#include "experts/sm90/formats/mxfp4_bf16.h"
#include "experts/sm90/formats/mxfp8.h"
#include "experts/sm90/formats/nvfp4.h"
#include "experts/sm90/formats/table_bf16.h"
#include "experts/sm90/formats/table_narrow.h"
#include "experts/sm90/repack_codes.h"
#include "experts/sm90/repack_strips.h"
#include "experts/sm90/weight_codes.h"
#include "quant/operand_forms.h"

namespace moesaic::cuda {

// One translation unit each, generated from the list in CMakeLists.txt.
LaunchGrouped launch_grouped_bf16_swiglu, launch_grouped_bf16_any;
LaunchGrouped launch_grouped_bf16_relu2, launch_grouped_fp8_block_relu2;
LaunchGrouped launch_grouped_fp8_row_relu2, launch_grouped_nvfp4_relu2;
LaunchGrouped launch_grouped_fp8_block_swiglu, launch_grouped_fp8_block_any;
LaunchGrouped launch_grouped_fp8_block_wide, launch_grouped_fp8_row_wide, launch_grouped_int8_wide;
LaunchGrouped launch_grouped_fp8_block_snug, launch_grouped_fp8_row_snug, launch_grouped_int8_snug;
LaunchGrouped launch_grouped_mxfp4_bf16_wide;
LaunchGrouped launch_grouped_fp8_row_swiglu, launch_grouped_fp8_row_any;
LaunchGrouped launch_grouped_int4_fp8_swiglu, launch_grouped_int4_fp8_any;
LaunchGrouped launch_grouped_int8_swiglu, launch_grouped_int8_any;
LaunchGrouped launch_grouped_mxfp4_bf16_swiglu, launch_grouped_mxfp4_bf16_any;
LaunchGrouped launch_grouped_int4_bf16_swiglu, launch_grouped_int4_bf16_any;
LaunchGrouped launch_grouped_int4_narrow_swiglu, launch_grouped_int4_narrow_any;
LaunchGrouped launch_grouped_table_bf16_swiglu, launch_grouped_table_narrow_swiglu;
LaunchGrouped launch_grouped_int8_bf16_swiglu, launch_grouped_int8_narrow_swiglu;
LaunchGrouped launch_grouped_fp8_bf16_swiglu;
LaunchGrouped launch_grouped_int4_minima_swiglu, launch_grouped_int8_minima_swiglu;
LaunchGrouped launch_grouped_int4_minima_relu2, launch_grouped_int8_minima_relu2;
LaunchGrouped launch_grouped_int8_narrow_relu2;
LaunchGrouped launch_grouped_mxfp8_swiglu, launch_grouped_mxfp8_any;
LaunchGrouped launch_grouped_nvfp4_swiglu, launch_grouped_nvfp4_any;

EpilogueKind epilogue_of(ActivationKind kind) {
  if (!is_gated(kind)) return EpilogueKind::kPlain;
  const bool swiglu = kind == ActivationKind::kSilu || kind == ActivationKind::kSwigluOai ||
                      kind == ActivationKind::kGeluTanh;
  return swiglu ? EpilogueKind::kSwiglu : EpilogueKind::kGeneral;
}

namespace {

#if MOESAIC_HAS_CUDA
#define MOESAIC_ON_DEVICE(function) (&(function))
#else
#define MOESAIC_ON_DEVICE(function) nullptr
#endif

std::int64_t w13_image_bytes(const ExpertsPlan& plan) { return plan.w13.image_bytes(); }
std::int64_t w2_image_bytes(const ExpertsPlan& plan) { return plan.w2.image_bytes(); }
std::int64_t w13_block_bytes(const ExpertsPlan& plan) { return plan.w13.scale_bytes(); }
std::int64_t w2_block_bytes(const ExpertsPlan& plan) { return plan.w2.scale_bytes(); }
std::int64_t w13_row_bytes(const ExpertsPlan& plan) { return plan.w13.rows * 4; }
std::int64_t w2_row_bytes(const ExpertsPlan& plan) { return plan.w2.rows * 4; }
std::int64_t one_float(const ExpertsPlan&) { return 4; }

void bind_w13(PlacedWeights& w, const std::byte* at) { w.w13 = at; }
void bind_w2(PlacedWeights& w, const std::byte* at) { w.w2 = at; }
void bind_w13_scale(PlacedWeights& w, const std::byte* at) {
  w.w13_scale = reinterpret_cast<const float*>(at);
}
void bind_w2_scale(PlacedWeights& w, const std::byte* at) {
  w.w2_scale = reinterpret_cast<const float*>(at);
}
void bind_w13_input_scale(PlacedWeights& w, const std::byte* at) {
  w.w13_input_scale = reinterpret_cast<const float*>(at);
}
void bind_w2_input_scale(PlacedWeights& w, const std::byte* at) {
  w.w2_input_scale = reinterpret_cast<const float*>(at);
}

std::int64_t w13_perm_bytes(const ExpertsPlan& plan) {
  return plan.weight.act_order ? plan.w13.columns * 4 : 0;
}
void bind_w13_perm(PlacedWeights& w, const std::byte* at) {
  w.w13_perm = reinterpret_cast<const std::int32_t*>(at);
}

constexpr WeightPart kImages[] = {{"w13", &bind_w13, &w13_image_bytes},
                                  {"w2", &bind_w2, &w2_image_bytes}};
constexpr WeightPart kImagesAndBlockScales[] = {kImages[0],
                                                kImages[1],
                                                {"w13_scale", &bind_w13_scale, &w13_block_bytes},
                                                {"w2_scale", &bind_w2_scale, &w2_block_bytes}};

// Images, then where the hidden state of each column of w13 is.
constexpr WeightPart kImagesAndOrder[] = {
    kImages[0], kImages[1], {"w13_perm", &bind_w13_perm, &w13_perm_bytes}};

// Images, then a scale per row of both matrices, then static scales of the rows that they multiply
// (1 without).
constexpr WeightPart kImagesAndRowScales[] = {
    kImages[0],
    kImages[1],
    {"w13_scale", &bind_w13_scale, &w13_row_bytes},
    {"w2_scale", &bind_w2_scale, &w2_row_bytes},
    {"w13_input_scale", &bind_w13_input_scale, &one_float},
    {"w2_input_scale", &bind_w2_input_scale, &one_float}};

template <int kMultiple>
Status check_widths(const MoeProblem& problem) {
  for (const auto& [name, value] : {std::pair{"hidden_size", problem.hidden_size},
                                    std::pair{"intermediate_size", problem.intermediate_size}}) {
    if (value % kMultiple != 0) {
      return unsupported(fmt::format("{}: got {}, need a multiple of {}", name, value, kMultiple));
    }
  }
  return {};
}

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

Status check_strips(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_strip_scales(problem.quant.weight));
  if (problem.quant.weight.act_order && problem.apply_router_weight_on_input) {
    return unsupported("apply_router_weight_on_input: got act-order weights, need others");
  }
  return check_widths<8>(problem);
}

// Formats without builds for other activations, which would be as large again.
template <bool kRelu2>
Status check_strips_swiglu(const MoeProblem& problem) {
  const ActivationKind kind = problem.activation.kind;
  const bool relu2 = kRelu2 && kind == ActivationKind::kRelu2NoMul;
  if (relu2 || epilogue_of(kind) == EpilogueKind::kSwiglu) return check_strips(problem);
  return unsupported(fmt::format("activation: got {} with {} weights, need silu, swigluoai{}",
                                 activation_name(kind), dtype_name(problem.quant.weight.dtype),
                                 kRelu2 ? ", gelu_tanh or relu2_no_mul" : " or gelu_tanh"));
}

// With builds for relu2_no_mul of its own.
constexpr void add_relu2(FormatRow& row, LaunchGrouped* unit) {
  row.has_relu2 = true;
  row.units.relu2 = unit;
}

// A row's sizes follow from the format's policy.
template <class Format>
constexpr FormatRow row_of(ComputeScheme scheme) {
  FormatRow row{};
  row.scheme = scheme;
  row.takes = nullptr;
  row.rows = Format::Tokens::kForm;
  row.chunk_k = Format::kChunkK;
  row.slab_bytes = FormatSizes<Format>::kSlabBytes;
  row.inner_multiple = 1;
  row.has_relu2 = false;
  return row;
}

constexpr FormatRow bf16_row() {
  FormatRow row = row_of<Bf16>(ComputeScheme::kBF16);
  row.inner_multiple = 8;
  // Items are twice as long as in fp8: two of them per pair of CTAs still gain (Qwen3-235B: about
  // 4 %). Sharing weights pays where experts have two groups and the kernel waits for memory
  // traffic: up to 9 %.
  row.tiles = {.split_items = 2, .paired_rows = 96};
  row.parts = kImages;
  row.check = &check_widths<8>;
  row.repack = MOESAIC_ON_DEVICE(repack_tiles);
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_bf16_swiglu),
               .any = MOESAIC_ON_DEVICE(launch_grouped_bf16_any)};
  add_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_bf16_relu2));
  return row;
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
               .wide = MOESAIC_ON_DEVICE(launch_grouped_fp8_block_wide),
               .snug = MOESAIC_ON_DEVICE(launch_grouped_fp8_block_snug),
               .any = MOESAIC_ON_DEVICE(launch_grouped_fp8_block_any)};
  add_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_fp8_block_relu2));
  return row;
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
               .wide = MOESAIC_ON_DEVICE(launch_grouped_fp8_row_wide),
               .snug = MOESAIC_ON_DEVICE(launch_grouped_fp8_row_snug),
               .any = MOESAIC_ON_DEVICE(launch_grouped_fp8_row_any)};
  add_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_fp8_row_relu2));
  return row;
}

constexpr FormatRow int8_row() {
  FormatRow row = row_scaled<Int8>(ComputeScheme::kInt8, 144);
  row.check = &check_int8;
  row.units = {.swiglu = MOESAIC_ON_DEVICE(launch_grouped_int8_swiglu),
               .wide = MOESAIC_ON_DEVICE(launch_grouped_int8_wide),
               .snug = MOESAIC_ON_DEVICE(launch_grouped_int8_snug),
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

// Weights that are decoded in registers. Groups of 32 columns have twice the warps to decode, which
// pays up to 16 rows per expert (measured). The wider a group, the fewer times weights are decoded.
constexpr TileRules decoded_tiles(int widest) {
  return {.split_items = 1, .paired_rows = 0, .widest = widest, .narrow_rows = 16};
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
               .wide = MOESAIC_ON_DEVICE(launch_grouped_mxfp4_bf16_wide),
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
  // No registers for more columns.
  FormatRow row = decoded<Int4Fp8>(ComputeScheme::kInt4Fp8, RowForm::kFp8Row, 128);
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
  add_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_nvfp4_relu2));
  return row;
}

// Of the scheme of all weights whose activations are bf16.
constexpr FormatRow weight_only(FormatRow row, std::string_view name,
                                bool (*takes)(const OperandQuant& weight)) {
  row.name = name;
  row.takes = takes;
  return row;
}

// Weights that are decoded to bf16 in registers.
template <class Format>
constexpr FormatRow row_of_strips(std::string_view name, bool (*takes)(const OperandQuant& weight),
                                  LaunchGrouped* swiglu, int widest = 128) {
  FormatRow row = row_of<Format>(ComputeScheme::kWeightOnly);
  row.takes = takes;
  row.name = name;
  row.image = &code_image;
  row.tiles = decoded_tiles(widest);
  row.parts = kImagesAndOrder;
  row.check = &check_strips_swiglu<false>;
  row.repack = MOESAIC_ON_DEVICE(repack_code_strips);
  row.units.swiglu = swiglu;
  return row;
}

// The weights that `has`, in groups of at least 64 columns and in narrower ones, and with minima.
template <bool (*has)(const OperandQuant& weight)>
bool takes_wide(const OperandQuant& weight) {
  return has(weight) && has_scales_of_sums(weight);
}
template <bool (*has)(const OperandQuant& weight)>
bool takes_narrow(const OperandQuant& weight) {
  return has(weight) && !has_scales_of_sums(weight) && !has_minima(weight);
}
template <bool (*has)(const OperandQuant& weight)>
bool takes_minima(const OperandQuant& weight) {
  return has(weight) && has_minima(weight);
}

template <class Format>
constexpr FormatRow row_of_int4(bool (*takes)(const OperandQuant& weight), LaunchGrouped* swiglu,
                                LaunchGrouped* any, int widest) {
  FormatRow row = row_of_strips<Format>("int4-bf16", takes, swiglu, widest);
  row.tiles.middle = 48;
  row.check = &check_strips;
  row.units.any = any;
  return row;
}

// The same for activations of models whose files have such weights.
constexpr FormatRow and_relu2(FormatRow row, LaunchGrouped* relu2) {
  add_relu2(row, relu2);
  row.check = &check_strips_swiglu<true>;
  return row;
}

constexpr FormatRow int4_minima_row() {
  FormatRow row =
      row_of_strips<Int4Minima>("int4-bf16", &takes_minima<has_int4_codes>,
                                MOESAIC_ON_DEVICE(launch_grouped_int4_minima_swiglu), 160);
  row.tiles.middle = 48;
  return and_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_int4_minima_relu2));
}

constexpr FormatRow table_bf16_row() {
  FormatRow row = row_of_strips<TableBf16>("nf4-bf16", &takes_wide<has_table_codes>,
                                           MOESAIC_ON_DEVICE(launch_grouped_table_bf16_swiglu));
  row.tiles.middle = 48;
  return row;
}

constexpr FormatRow fp8_bf16_row(ComputeScheme scheme, std::string_view name) {
  FormatRow row = row_of_strips<Fp8Bf16>(name, &has_fp8_codes,
                                         MOESAIC_ON_DEVICE(launch_grouped_fp8_bf16_swiglu));
  row.scheme = scheme;
  return row;
}

constexpr FormatRow kFormats[] = {
    bf16_row(),
    fp8_block_row(),
    mxfp4_row(ComputeScheme::kMxfp4Bf16, RowForm::kBf16),
    fp8_scaled_row(),
    int8_row(),
    mxfp8_row(ComputeScheme::kMxfp8, RowForm::kMx8Values),
    mxfp4_row(ComputeScheme::kMxfp4, RowForm::kMx4Values),
    mxfp4_fp8_row(),
    nvfp4_row(ComputeScheme::kNvfp4, RowForm::kNv4Values),
    int4_fp8_row(),
    weight_only(nvfp4_row(ComputeScheme::kWeightOnly, RowForm::kBf16), "nvfp4-bf16",
                &is_nvfp4_weight),
    weight_only(mxfp8_row(ComputeScheme::kWeightOnly, RowForm::kBf16), "mxfp8-bf16",
                &is_mxfp8_weight),
    row_of_int4<Int4Bf16>(&takes_wide<has_int4_codes>,
                          MOESAIC_ON_DEVICE(launch_grouped_int4_bf16_swiglu),
                          MOESAIC_ON_DEVICE(launch_grouped_int4_bf16_any), 136),
    row_of_int4<Int4Narrow>(&takes_narrow<has_int4_codes>,
                            MOESAIC_ON_DEVICE(launch_grouped_int4_narrow_swiglu),
                            MOESAIC_ON_DEVICE(launch_grouped_int4_narrow_any), 160),
    int4_minima_row(),
    table_bf16_row(),
    row_of_strips<TableNarrow>("nf4-bf16", &takes_narrow<has_table_codes>,
                               MOESAIC_ON_DEVICE(launch_grouped_table_narrow_swiglu), 160),
    row_of_strips<Int8Bf16>("int8-bf16", &takes_wide<has_int8_codes>,
                            MOESAIC_ON_DEVICE(launch_grouped_int8_bf16_swiglu)),
    and_relu2(row_of_strips<Int8Narrow>("int8-bf16", &takes_narrow<has_int8_codes>,
                                        MOESAIC_ON_DEVICE(launch_grouped_int8_narrow_swiglu), 136),
              MOESAIC_ON_DEVICE(launch_grouped_int8_narrow_relu2)),
    and_relu2(row_of_strips<Int8Minima>("int8-bf16", &takes_minima<has_int8_codes>,
                                        MOESAIC_ON_DEVICE(launch_grouped_int8_minima_swiglu), 136),
              MOESAIC_ON_DEVICE(launch_grouped_int8_minima_relu2)),
    fp8_bf16_row(ComputeScheme::kFp8Bf16, ""),
    fp8_bf16_row(ComputeScheme::kWeightOnly, "fp8-channel-bf16")};

}  // namespace

Result<MoeProblem> fitted_problem(const MoeProblem& problem) {
  MOESAIC_ASSIGN_OR_RETURN(const FormatRow* const format, format_of(problem));
  return experts::with_padded_width(problem, format->inner_multiple);
}

std::span<const FormatRow> grouped_formats() { return kFormats; }

LaunchGrouped* launcher_of(const FormatRow& row, const GroupedVariant& variant) {
  const GroupedUnits& units = row.units;
  if (variant.epilogue == EpilogueKind::kRelu2) return units.relu2;
  if (variant.epilogue != EpilogueKind::kSwiglu) return units.any;
  if (variant.max_columns == row.tiles.snug) return units.snug;
  return variant.max_columns > 64 && units.wide != nullptr ? units.wide : units.swiglu;
}

std::string names_of_formats(bool (*has)(const FormatRow& row)) {
  std::vector<std::string_view> names;
  for (const FormatRow& row : kFormats) {
    if (has != nullptr && !has(row)) continue;
    const std::string_view name = row.name.empty() ? compute_scheme_name(row.scheme) : row.name;
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  if (names.size() == 1) return std::string(names[0]);
  const std::span<const std::string_view> but_last(names.data(), names.size() - 1);
  return fmt::format("{} or {}", fmt::join(but_last, ", "), names.back());
}

Result<const FormatRow*> format_of(const MoeProblem& problem) {
  const Scheme& scheme = problem.quant;
  for (const FormatRow& row : kFormats) {
    const bool weight = row.takes == nullptr || row.takes(scheme.weight);
    if (row.scheme == scheme.kind && weight) return &row;
  }
  const std::string_view kind = compute_scheme_name(scheme.kind);
  const bool named = scheme.kind == ComputeScheme::kWeightOnly && !scheme.name.empty();
  return unsupported(
      fmt::format("scheme: got {}, need {}", named ? scheme.name : kind, names_of_formats()));
}

}  // namespace moesaic::cuda
