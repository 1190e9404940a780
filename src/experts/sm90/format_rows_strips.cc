// Formats of weights with any scales, in strips behind their codes, and bf16 activations.
#include <fmt/format.h>

#include "core/refusal.h"
#include "experts/sm90/format_rows.h"
#include "experts/sm90/formats/fp8_bf16.h"
#include "experts/sm90/formats/int4_bf16.h"
#include "experts/sm90/formats/int4_int6.h"
#include "experts/sm90/formats/int4_int6_super.h"
#include "experts/sm90/formats/int4_int6_super_minima.h"
#include "experts/sm90/formats/int4_int8.h"
#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int4_narrow.h"
#include "experts/sm90/formats/int4_super.h"
#include "experts/sm90/formats/int4_super_int4.h"
#include "experts/sm90/formats/int4_super_int6.h"
#include "experts/sm90/formats/int4_super_minima.h"
#include "experts/sm90/formats/int4_super_minima_int4.h"
#include "experts/sm90/formats/int6_int6_super.h"
#include "experts/sm90/formats/int6_minima.h"
#include "experts/sm90/formats/int6_narrow.h"
#include "experts/sm90/formats/int6_super.h"
#include "experts/sm90/formats/int6_super_minima.h"
#include "experts/sm90/formats/int8_bf16.h"
#include "experts/sm90/formats/int8_minima.h"
#include "experts/sm90/formats/int8_narrow.h"
#include "experts/sm90/formats/table_bf16.h"
#include "experts/sm90/formats/table_narrow.h"
#include "experts/sm90/repack_strips.h"
#include "experts/sm90/weight_codes.h"

namespace moesaic::cuda {

// Generated from the list in CMakeLists.txt.
LaunchGrouped launch_grouped_int4_bf16_swiglu, launch_grouped_int4_bf16_relu2,
    launch_grouped_int4_bf16_any;
LaunchGrouped launch_grouped_int4_narrow_swiglu, launch_grouped_int4_narrow_relu2,
    launch_grouped_int4_narrow_any;
LaunchGrouped launch_grouped_table_bf16_swiglu, launch_grouped_table_bf16_relu2;
LaunchGrouped launch_grouped_table_narrow_swiglu, launch_grouped_table_narrow_relu2;
LaunchGrouped launch_grouped_int8_bf16_swiglu, launch_grouped_int8_bf16_relu2;
LaunchGrouped launch_grouped_int8_narrow_swiglu, launch_grouped_int8_narrow_relu2;
LaunchGrouped launch_grouped_fp8_bf16_swiglu, launch_grouped_fp8_bf16_relu2;
LaunchGrouped launch_grouped_int4_minima_swiglu, launch_grouped_int4_minima_relu2;
LaunchGrouped launch_grouped_int4_super_swiglu, launch_grouped_int4_super_relu2;
LaunchGrouped launch_grouped_int4_super_minima_swiglu, launch_grouped_int4_super_minima_relu2;
LaunchGrouped launch_grouped_int6_narrow_swiglu, launch_grouped_int6_narrow_relu2;
LaunchGrouped launch_grouped_int6_minima_swiglu, launch_grouped_int6_minima_relu2;
LaunchGrouped launch_grouped_int6_super_swiglu, launch_grouped_int6_super_relu2;
LaunchGrouped launch_grouped_int6_super_minima_swiglu, launch_grouped_int6_super_minima_relu2;
LaunchGrouped launch_grouped_int4_int6_swiglu, launch_grouped_int4_int6_super_swiglu,
    launch_grouped_int4_int6_super_minima_swiglu, launch_grouped_int4_int8_swiglu,
    launch_grouped_int6_int6_super_swiglu, launch_grouped_int4_super_int4_swiglu,
    launch_grouped_int4_super_int6_swiglu, launch_grouped_int4_super_minima_int4_swiglu;
LaunchGrouped launch_grouped_int8_minima_swiglu, launch_grouped_int8_minima_relu2;

namespace {

Status check_strips(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_strip_scales(problem.quant.weight));
  if (problem.quant.weight.act_order && problem.apply_router_weight_on_input) {
    return unsupported("apply_router_weight_on_input: got act-order weights, need others");
  }
  return check_widths<8>(problem);
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
  row.check = &check_strips;
  row.has_any = false;  // would be as large again
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
// 4-bit integers that have 4 bits in the image, and scales that are numbers.
bool has_int4_strips(const OperandQuant& weight) {
  return has_int4_codes(weight) && image_bits(weight) == 4 && !has_super_scales(weight);
}
// 4-bit and 6-bit integers whose scales are integers times a number.
bool has_int4_super(const OperandQuant& weight) {
  return has_int4_codes(weight) && has_super_scales(weight);
}
bool has_int6_super(const OperandQuant& weight) {
  return has_int6_codes(weight) && has_super_scales(weight);
}

template <class Format>
constexpr FormatRow row_of_int4(bool (*takes)(const OperandQuant& weight), LaunchGrouped* swiglu,
                                LaunchGrouped* relu2, LaunchGrouped* any, int widest) {
  FormatRow row = row_of_strips<Format>("int4-bf16", takes, swiglu, widest);
  row.tiles.middle = 48;
  row.has_any = true;
  row.units.any = any;
  return with_relu2(row, relu2);
}

constexpr FormatRow int4_bf16_row() {
  FormatRow row = row_of_int4<Int4Bf16>(&takes_wide<has_int4_strips>,
                                        MOESAIC_ON_DEVICE(launch_grouped_int4_bf16_swiglu),
                                        MOESAIC_ON_DEVICE(launch_grouped_int4_bf16_relu2),
                                        MOESAIC_ON_DEVICE(launch_grouped_int4_bf16_any), 136);
  row.has_step = false;
  return row;
}

template <class Format>
constexpr FormatRow row_of_integers(std::string_view name,
                                    bool (*takes)(const OperandQuant& weight),
                                    LaunchGrouped* swiglu, LaunchGrouped* relu2, int widest = 136,
                                    int middle = 64) {
  FormatRow row = row_of_strips<Format>(name, takes, swiglu, widest);
  row.tiles.middle = middle;
  return with_relu2(row, relu2);
}

// Matrices of two forms. They are asked before the rows of one form for both.
template <class Format>
constexpr FormatRow row_of_two(std::string_view name, bool (*w13)(const OperandQuant& weight),
                               bool (*w2)(const OperandQuant& weight), LaunchGrouped* swiglu,
                               int middle = Format::kWeightBits == 4 ? 48 : 64) {
  FormatRow row = row_of_strips<Format>(name, w13, swiglu, 136);
  row.takes_w2 = w2;
  row.tiles.middle = middle;
  return row;
}

constexpr FormatRow table_bf16_row() {
  FormatRow row = row_of_strips<TableBf16>("nf4-bf16", &takes_wide<has_table_codes>,
                                           MOESAIC_ON_DEVICE(launch_grouped_table_bf16_swiglu));
  row.tiles.middle = 48;
  return with_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_table_bf16_relu2));
}

constexpr FormatRow fp8_bf16_row(ComputeScheme scheme, std::string_view name) {
  FormatRow row = row_of_strips<Fp8Bf16>(name, &has_fp8_codes,
                                         MOESAIC_ON_DEVICE(launch_grouped_fp8_bf16_swiglu));
  row.scheme = scheme;
  return with_relu2(row, MOESAIC_ON_DEVICE(launch_grouped_fp8_bf16_relu2));
}

constexpr FormatRow kStrips[] = {
    row_of_two<Int4Int6Super>("int4-bf16", &takes_minima<has_int4_strips>,
                              &takes_narrow<has_int6_super>,
                              MOESAIC_ON_DEVICE(launch_grouped_int4_int6_super_swiglu)),
    row_of_two<Int4Int6SuperMinima>(
        "int4-bf16", &takes_minima<has_int4_strips>, &takes_minima<has_int6_super>,
        MOESAIC_ON_DEVICE(launch_grouped_int4_int6_super_minima_swiglu)),
    row_of_two<Int4Int6>("int4-bf16", &takes_minima<has_int4_strips>, &takes_narrow<has_int6_codes>,
                         MOESAIC_ON_DEVICE(launch_grouped_int4_int6_swiglu)),
    row_of_two<Int4Int8>("int4-bf16", &takes_minima<has_int4_strips>, &takes_narrow<has_int8_codes>,
                         MOESAIC_ON_DEVICE(launch_grouped_int4_int8_swiglu)),
    row_of_two<Int6Int6Super>("int6-bf16", &takes_minima<has_int6_super>,
                              &takes_narrow<has_int6_super>,
                              MOESAIC_ON_DEVICE(launch_grouped_int6_int6_super_swiglu)),
    row_of_two<Int4SuperInt4>("int4-bf16", &takes_narrow<has_int4_super>,
                              &takes_minima<has_int4_strips>,
                              MOESAIC_ON_DEVICE(launch_grouped_int4_super_int4_swiglu)),
    row_of_two<Int4SuperInt6>("int4-bf16", &takes_narrow<has_int4_super>,
                              &takes_minima<has_int6_super>,
                              MOESAIC_ON_DEVICE(launch_grouped_int4_super_int6_swiglu)),
    row_of_two<Int4SuperMinimaInt4>(
        "int4-bf16", &takes_minima<has_int4_super>, &takes_narrow<has_int4_super>,
        MOESAIC_ON_DEVICE(launch_grouped_int4_super_minima_int4_swiglu), 64),
    row_of_integers<Int4Super>("int4-bf16", &takes_narrow<has_int4_super>,
                               MOESAIC_ON_DEVICE(launch_grouped_int4_super_swiglu),
                               MOESAIC_ON_DEVICE(launch_grouped_int4_super_relu2), 136, 48),
    row_of_integers<Int4SuperMinima>("int4-bf16", &takes_minima<has_int4_super>,
                                     MOESAIC_ON_DEVICE(launch_grouped_int4_super_minima_swiglu),
                                     MOESAIC_ON_DEVICE(launch_grouped_int4_super_minima_relu2)),
    row_of_integers<Int6Super>("int6-bf16", &takes_narrow<has_int6_super>,
                               MOESAIC_ON_DEVICE(launch_grouped_int6_super_swiglu),
                               MOESAIC_ON_DEVICE(launch_grouped_int6_super_relu2)),
    row_of_integers<Int6SuperMinima>("int6-bf16", &takes_minima<has_int6_super>,
                                     MOESAIC_ON_DEVICE(launch_grouped_int6_super_minima_swiglu),
                                     MOESAIC_ON_DEVICE(launch_grouped_int6_super_minima_relu2)),
    row_of_integers<Int6Narrow>("int6-bf16", &takes_narrow<has_int6_codes>,
                                MOESAIC_ON_DEVICE(launch_grouped_int6_narrow_swiglu),
                                MOESAIC_ON_DEVICE(launch_grouped_int6_narrow_relu2)),
    row_of_integers<Int6Minima>("int6-bf16", &takes_minima<has_int6_codes>,
                                MOESAIC_ON_DEVICE(launch_grouped_int6_minima_swiglu),
                                MOESAIC_ON_DEVICE(launch_grouped_int6_minima_relu2)),
    int4_bf16_row(),
    row_of_int4<Int4Narrow>(&takes_narrow<has_int4_strips>,
                            MOESAIC_ON_DEVICE(launch_grouped_int4_narrow_swiglu),
                            MOESAIC_ON_DEVICE(launch_grouped_int4_narrow_relu2),
                            MOESAIC_ON_DEVICE(launch_grouped_int4_narrow_any), 160),
    row_of_integers<Int4Minima>("int4-bf16", &takes_minima<has_int4_strips>,
                                MOESAIC_ON_DEVICE(launch_grouped_int4_minima_swiglu),
                                MOESAIC_ON_DEVICE(launch_grouped_int4_minima_relu2), 160, 48),
    table_bf16_row(),
    with_relu2(
        row_of_strips<TableNarrow>("nf4-bf16", &takes_narrow<has_table_codes>,
                                   MOESAIC_ON_DEVICE(launch_grouped_table_narrow_swiglu), 160),
        MOESAIC_ON_DEVICE(launch_grouped_table_narrow_relu2)),
    row_of_integers<Int8Bf16>("int8-bf16", &takes_wide<has_int8_codes>,
                              MOESAIC_ON_DEVICE(launch_grouped_int8_bf16_swiglu),
                              MOESAIC_ON_DEVICE(launch_grouped_int8_bf16_relu2), 128),
    row_of_integers<Int8Narrow>("int8-bf16", &takes_narrow<has_int8_codes>,
                                MOESAIC_ON_DEVICE(launch_grouped_int8_narrow_swiglu),
                                MOESAIC_ON_DEVICE(launch_grouped_int8_narrow_relu2)),
    row_of_integers<Int8Minima>("int8-bf16", &takes_minima<has_int8_codes>,
                                MOESAIC_ON_DEVICE(launch_grouped_int8_minima_swiglu),
                                MOESAIC_ON_DEVICE(launch_grouped_int8_minima_relu2)),
    fp8_bf16_row(ComputeScheme::kFp8Bf16, ""),
    fp8_bf16_row(ComputeScheme::kWeightOnly, "fp8-channel-bf16")};

}  // namespace

std::span<const FormatRow> formats_of_strips() { return kStrips; }

}  // namespace moesaic::cuda
