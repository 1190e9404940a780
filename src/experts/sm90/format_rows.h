// What rows of formats are made of (formats.h): arrays of weights, sizes, rules for builds. The rows
// are in format_rows_schemes.cc and format_rows_strips.cc.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "core/refusal.h"
#include "experts/sm90/experts_plan.h"
#include "experts/sm90/format_parts.h"
#include "experts/sm90/formats.h"

#if MOESAIC_HAS_CUDA
#define MOESAIC_ON_DEVICE(function) (&(function))
#else
#define MOESAIC_ON_DEVICE(function) nullptr
#endif

namespace moesaic::cuda {

inline std::int64_t w13_image_bytes(const ExpertsPlan& plan) { return plan.w13.image_bytes(); }
inline std::int64_t w2_image_bytes(const ExpertsPlan& plan) { return plan.w2.image_bytes(); }
inline std::int64_t w13_block_bytes(const ExpertsPlan& plan) { return plan.w13.scale_bytes(); }
inline std::int64_t w2_block_bytes(const ExpertsPlan& plan) { return plan.w2.scale_bytes(); }
inline std::int64_t w13_row_bytes(const ExpertsPlan& plan) { return plan.w13.rows * 4; }
inline std::int64_t w2_row_bytes(const ExpertsPlan& plan) { return plan.w2.rows * 4; }
inline std::int64_t one_float(const ExpertsPlan&) { return 4; }

inline void bind_w13(PlacedWeights& w, const std::byte* at) { w.w13 = at; }
inline void bind_w2(PlacedWeights& w, const std::byte* at) { w.w2 = at; }
inline void bind_w13_scale(PlacedWeights& w, const std::byte* at) {
  w.w13_scale = reinterpret_cast<const float*>(at);
}
inline void bind_w2_scale(PlacedWeights& w, const std::byte* at) {
  w.w2_scale = reinterpret_cast<const float*>(at);
}
inline void bind_w13_input_scale(PlacedWeights& w, const std::byte* at) {
  w.w13_input_scale = reinterpret_cast<const float*>(at);
}
inline void bind_w2_input_scale(PlacedWeights& w, const std::byte* at) {
  w.w2_input_scale = reinterpret_cast<const float*>(at);
}

inline std::int64_t w13_perm_bytes(const ExpertsPlan& plan) {
  return plan.weight.act_order ? plan.w13.columns * 4 : 0;
}
inline void bind_w13_perm(PlacedWeights& w, const std::byte* at) {
  w.w13_perm = reinterpret_cast<const std::int32_t*>(at);
}

inline constexpr WeightPart kImages[] = {{"w13", &bind_w13, &w13_image_bytes},
                                         {"w2", &bind_w2, &w2_image_bytes}};
inline constexpr WeightPart kImagesAndBlockScales[] = {
    kImages[0],
    kImages[1],
    {"w13_scale", &bind_w13_scale, &w13_block_bytes},
    {"w2_scale", &bind_w2_scale, &w2_block_bytes}};

// Images, then where the hidden state of each column of w13 is.
inline constexpr WeightPart kImagesAndOrder[] = {
    kImages[0], kImages[1], {"w13_perm", &bind_w13_perm, &w13_perm_bytes}};

// Images, then a scale per row of both matrices, then static scales of the rows that they multiply
// (1 without).
inline constexpr WeightPart kImagesAndRowScales[] = {
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

// With builds for relu2_no_mul of its own.
constexpr FormatRow with_relu2(FormatRow row, LaunchGrouped* unit) {
  row.has_relu2 = true;
  row.units.relu2 = unit;
  return row;
}

// A row's sizes follow from the format's policy.
template <class Format>
constexpr FormatRow row_of(ComputeScheme scheme) {
  FormatRow row{};
  row.scheme = scheme;
  row.takes = row.takes_w2 = nullptr;
  row.rows = Format::Tokens::kForm;
  row.chunk_k = Format::kChunkK;
  row.slab_bytes = FormatSizes<Format>::kSlabBytes;
  row.inner_multiple = 1;
  row.has_relu2 = false;
  row.has_step = true;
  row.has_any = true;
  return row;
}

// Weights that are decoded in registers. Groups of 32 columns have twice the warps to decode, which
// pays up to 16 rows per expert (measured). The wider a group, the fewer times weights are decoded.
constexpr TileRules decoded_tiles(int widest) {
  return {.split_items = 1, .paired_rows = 0, .widest = widest, .narrow_rows = 16};
}

// Schemes of their own, and weights in strips of scales (weight_codes.h) with bf16 activations.
std::span<const FormatRow> formats_of_schemes();
std::span<const FormatRow> formats_of_strips();

}  // namespace moesaic::cuda
