#include "checkpoint/config/linear_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "checkpoint/config/stored_formats.h"
#include "core/checked.h"
#include "core/fault.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::checkpoint {
namespace {

// --- sizes ---

SizeRule any_size(const LinearFormat&) { return {}; }
SizeRule mx_groups(const LinearFormat&) { return {.columns = quant::kMxGroupSize}; }
SizeRule nvfp4_groups(const LinearFormat&) { return {.columns = quant::kNvfp4GroupSize}; }
SizeRule code_groups(const LinearFormat& f) {
  return {.columns = std::max<std::int64_t>(f.group_size, 2), .columns_are = " (group_size)"};
}
SizeRule awq_groups(const LinearFormat& f) {
  SizeRule rule = code_groups(f);
  rule.rows = 8;
  rule.rows_are = " (a word)";
  return rule;
}
// The last group may be partial, words may not.
SizeRule gptq_words(const LinearFormat& f) {
  return {.columns = 32 / f.bits, .columns_are = " (a word)"};
}
SizeRule bnb4_blocks(const LinearFormat& f) {
  return {.columns = f.group_size, .columns_are = " (the block)"};
}

// --- where columns of w2 can be cut ---

std::int64_t one_column(const LinearFormat&) { return 1; }
std::int64_t fp8_tile(const LinearFormat& f) {
  return MOESAIC_FAULT(checkpoint_block_slices_in_rows) ? f.block.n
                                                        : std::lcm(f.block.n, f.block.k);
}
std::int64_t mx_group(const LinearFormat&) { return quant::kMxGroupSize; }
std::int64_t nvfp4_group(const LinearFormat&) { return quant::kNvfp4GroupSize; }
std::int64_t code_group(const LinearFormat& f) {
  return f.group_size > 0 ? std::lcm<std::int64_t>(f.group_size, 2) : 2;
}
std::int64_t bnb4_block(const LinearFormat& f) { return f.group_size; }
std::int64_t gguf_block(const LinearFormat& f) {
  return ggml_type_info(f.blocks[2]).block_elements;
}

// --- all experts in one tensor ---

using Scale = StackedForm::Scale;
StackedForm fp8_blocks_stacked(const LinearFormat&) { return {.scale = Scale::kOfLayout}; }
StackedForm fp8_tensor_stacked(const LinearFormat&) {
  return {.scale = Scale::kPerExpert, .transposed = true};
}
StackedForm fp8_channel_stacked(const LinearFormat&) {
  return {.scale = Scale::kPerRow, .transposed = true};
}
StackedForm mxfp8_stacked(const LinearFormat&) {
  return {.scale = Scale::kPerGroup,
          .scales = {DType::kU8, DType::kF8E8M0},
          .group = quant::kMxGroupSize};
}
StackedForm int8_stacked(const LinearFormat& f) {
  return {.scale = f.one_scale ? Scale::kPerExpert : Scale::kPerRow, .weight = DType::kI8};
}
// Only ModelOpt writes it.
StackedForm nvfp4_stacked(const LinearFormat& f) {
  if (f.names != NameStyle::kModelOpt) return {};
  return {.scale = Scale::kPerGroup,
          .transposed = true,
          .weight = DType::kU8,
          .codes_per_element = 2,
          .scales = {DType::kF8E4M3},
          .group = quant::kNvfp4GroupSize,
          .global_scale = true};
}

constexpr std::array<StoredFormatRow, kNumStoredFormats> kRows = {{
    {StoredFormat::kPlain, "plain", plain_scheme, any_size, one_column, nullptr},
    {StoredFormat::kFp8Block, "fp8-block", fp8_block_scheme, any_size, fp8_tile, nullptr,
     fp8_blocks_stacked},
    {StoredFormat::kMxfp4, "mxfp4", mxfp4_blocks_scheme, mx_groups, mx_group, nullptr},
    {StoredFormat::kFp8Tensor, "fp8-tensor", fp8_tensor_scheme, any_size, one_column,
     fp8_tensor_tensors, fp8_tensor_stacked},
    {StoredFormat::kFp8Channel, "fp8-channel", fp8_channel_scheme, any_size, one_column,
     fp8_channel_tensors, fp8_channel_stacked},
    {StoredFormat::kMxfp8, "mxfp8", mxfp8_scheme, mx_groups, mx_group, mxfp8_tensors,
     mxfp8_stacked},
    {StoredFormat::kInt8Channel, "int8", int8_scheme, any_size, one_column, int8_tensors,
     int8_stacked},
    {StoredFormat::kPacked, "pack-quantized", integer_scheme, code_groups, code_group,
     packed_tensors},
    {StoredFormat::kGptq, "gptq", integer_scheme, gptq_words, code_group, gptq_tensors},
    {StoredFormat::kAwq, "awq", integer_scheme, awq_groups, code_group, awq_tensors},
    {StoredFormat::kNvfp4, "nvfp4", nvfp4_scheme, nvfp4_groups, nvfp4_group, nvfp4_tensors,
     nvfp4_stacked},
    {StoredFormat::kMxfp4Linear, "mxfp4-pack-quantized", mxfp4_scheme, mx_groups, mx_group,
     mxfp4_tensors},
    {StoredFormat::kBnb4, "bitsandbytes 4-bit", bnb4_scheme, bnb4_blocks, bnb4_block, bnb4_tensors},
    {StoredFormat::kBnb8, "bitsandbytes 8-bit", bnb8_scheme, any_size, one_column, bnb8_tensors},
    {StoredFormat::kGguf, "GGUF", gguf_scheme, any_size, gguf_block, nullptr},
}};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].format != static_cast<StoredFormat>(i)) return false;
  }
  return true;
}
static_assert(in_order(), "rows in the order of StoredFormat");

}  // namespace

const StoredFormatRow& stored_format_row(StoredFormat format) {
  return kRows[static_cast<std::size_t>(format)];
}

std::string_view stored_format_name(StoredFormat format) { return stored_format_row(format).name; }

Result<Scheme> linear_scheme(const LinearFormat& f, DType dtype) {
  return stored_format_row(f.stored).scheme(f, dtype);
}

std::vector<LinearTensor> linear_tensors(const LinearFormat& f, std::int64_t rows,
                                         std::int64_t columns) {
  const auto tensors = stored_format_row(f.stored).tensors;
  return tensors != nullptr ? tensors(f, rows, columns) : std::vector<LinearTensor>();
}

Status check_linear_sizes(const LinearFormat& f, std::string_view what, std::int64_t rows,
                          std::int64_t columns) {
  const StoredFormatRow& row = stored_format_row(f.stored);
  const SizeRule rule = row.sizes(f);
  const auto multiple = [&](std::string_view axis, std::int64_t size, std::int64_t unit,
                            std::string_view why) -> Status {
    if (unit <= 1 || size % unit == 0) return {};
    return {StatusCode::kUnsupported, fmt::format("{}: got {} {} with {}, need a multiple of {}{}",
                                                  what, size, axis, row.name, unit, why)};
  };
  MOESAIC_RETURN_IF_ERROR(multiple("rows", rows, rule.rows, rule.rows_are));
  return multiple("columns", columns, rule.columns, rule.columns_are);
}

std::int64_t slice_unit(const LinearFormat& f) { return stored_format_row(f.stored).slice_unit(f); }

Shape fp8_scale_grid(const LinearFormat& f, std::int64_t rows, std::int64_t columns) {
  return {ceil_div(rows, f.block.n), ceil_div(columns, f.block.k)};
}

}  // namespace moesaic::checkpoint
