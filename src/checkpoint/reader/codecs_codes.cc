// Codecs of formats whose codes are stored as they are used: plain weights, FP8, int8, FP4.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "checkpoint/container/names.h"
#include "checkpoint/reader/fp8_checks.h"
#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/mlp_reader_impl.h"
#include "core/checked.h"
#include "core/fault.h"
#include "numerics/element.h"
#include "quant/block_scales.h"

namespace moesaic::checkpoint {
namespace {

bool all_zero(const std::uint8_t* codes, std::int64_t n, std::uint8_t magnitude) {
  return std::all_of(codes, codes + n, [=](std::uint8_t c) { return (c & magnitude) == 0; });
}

}  // namespace

// --- weights that are numbers themselves ---

std::uint8_t* MlpReader::rows_of(MatrixBuffers& m, const Window& w) const {
  return m.weight.as<std::uint8_t>() + w.to * w.cols * dtype_bits(weight_.dtype) / 8;
}

// Weights of the layer's dtype are read as they are, others (the layer's is F32 then) widened.
Status MlpReader::read_plain(const Window& w, MatrixBuffers* m) {
  auto* to = reinterpret_cast<std::byte*>(rows_of(*m, w));
  const DType dtype = stored(TensorKind::kWeight, w)->info->dtype;
  if (dtype == weight_.dtype) return read_elements(TensorKind::kWeight, w, to);
  const std::int64_t count = w.rows * w.cols;
  std::vector<std::byte> narrow(static_cast<std::size_t>(count * dtype_bits(dtype) / 8));
  MOESAIC_RETURN_IF_ERROR(read_elements(TensorKind::kWeight, w, narrow.data()));
  auto* wide = reinterpret_cast<float*>(to);
  for (std::int64_t i = 0; i < count; ++i) wide[i] = load_as_f32(narrow.data(), dtype, i);
  return {};
}

// --- codes of 8 bits ---

Status MlpReader::read_fp8_codes(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_weight(w, m));
  return check_e4m3_codes(place(TensorKind::kWeight, w, 1), rows_of(*m, w), w.rows, w.cols);
}

Status MlpReader::read_fp8_tensor(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_fp8_codes(w, m));
  return read_tensor_scale(w, m);
}

Status MlpReader::read_fp8_channel(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_fp8_codes(w, m));
  return read_row_scales(w, 0x7F, m);
}

Status MlpReader::read_mxfp8(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_fp8_codes(w, m));
  return read_exponents(w, m);
}

Status MlpReader::read_int8(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_weight(w, m));
  return read_row_scales(w, 0xFF, m);
}

Status MlpReader::read_bnb8(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(check_row_format(w));
  return read_int8(w, m);
}

// A grid of multipliers, one per tile. It may be stored with its tiles' own axes,
// [rows, 1, columns, 1], and for single experts in one tensor of all, gate's rows above up's.
Status MlpReader::read_fp8_block(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_weight(w, m));
  const bool down = w.part == Projection::kDown;
  const bool above = slice_.scales_stacked && !down && !is_fused(slice_.storage);
  Window of_scale = w;
  if (above) {
    of_scale.projection = Projection::kGate;
    of_scale.rows_all = 2 * w.rows_all;
    if (w.part == Projection::kUp) of_scale.first_row += w.rows_all;
  }
  const quant::BlockShape block = format_.block;
  if (of_scale.first_row % block.n != 0) {
    return {StatusCode::kUnsupported,
            fmt::format("{}: got rows from {} on, need a multiple of {}: gate and up would share a "
                        "scale",
                        name(TensorKind::kScale, w), of_scale.first_row, block.n)};
  }
  const bool first_expert =
      slice_.scales_stacked && MOESAIC_FAULT(checkpoint_stacked_scale_of_first);
  const std::int64_t before = first_expert ? 0 : slice_.scales_stacked ? expert_ : experts_before();
  Rectangle tiles = {before * ceil_div(of_scale.rows_all, block.n) + of_scale.first_row / block.n,
                     ceil_div(w.rows, block.n), w.first_col / block.k, ceil_div(w.cols, block.k)};
  if (MOESAIC_FAULT(checkpoint_scale_slice_in_rows)) {
    (down ? tiles.first_col : tiles.first_row) -= slice_.first / (down ? block.k : block.n);
  }
  const ShardSet::Located& from = *stored(TensorKind::kScale, of_scale);
  const DType dtype = from.info->dtype;
  std::vector<std::byte> raw(
      static_cast<std::size_t>(tiles.rows * tiles.cols * dtype_bits(dtype) / 8));
  MOESAIC_RETURN_IF_ERROR(read_rectangle(from, ceil_div(w.cols_all, block.k), tiles, raw.data()));
  float* scales = m->scale.as<float>() + ceil_div(w.to, block.n) * tiles.cols;
  for (std::int64_t i = 0; i < tiles.rows * tiles.cols; ++i) {
    scales[i] = load_as_f32(raw.data(), dtype, i);
  }
  return check_fp8_block({name(TensorKind::kWeight, w), name(TensorKind::kScale, w), rows_of(*m, w),
                          scales, w.rows, w.cols, experts_before() * w.rows_all + w.first_row,
                          w.first_col, block});
}

// --- codes of 4 bits ---

Status MlpReader::read_mxfp4(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_weight(w, m));
  return read_exponents(w, m);
}

Status MlpReader::read_nvfp4(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_weight(w, m));
  MOESAIC_RETURN_IF_ERROR(read_e4m3_scales(w, m));
  return read_global_scale(w);
}

// --- their parts ---

Status MlpReader::check_row_format(const Window& w) const {
  const auto& from = stored(TensorKind::kRowFormat, w);
  if (!from || MOESAIC_FAULT(checkpoint_bnb_any_row_format)) return {};
  constexpr std::array<std::string_view, 4> kFormats = {"row", "col32", "col_turing", "col_ampere"};
  MOESAIC_ASSIGN_OR_RETURN(const Tensor value, from->file->read_tensor(*from->info));
  const std::size_t format = *value.as<std::uint8_t>();
  if (format == 0) return {};
  const bool known = format < kFormats.size();
  return {known ? StatusCode::kUnsupported : StatusCode::kCorruptFile,
          fmt::format(
              "{}: got {}{}, need 0 (row)", quote_name(from->info->name), format,
              known ? fmt::format(" ({}, whose elements lie in another order)", kFormats[format])
                    : "")};
}

Status MlpReader::read_weight(const Window& w, MatrixBuffers* m) {
  return read_elements(TensorKind::kWeight, w, reinterpret_cast<std::byte*>(rows_of(*m, w)));
}

Result<float> MlpReader::read_number(TensorKind kind, const Window& w) const {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> all, read_floats(*stored(kind, w)));
  const auto per_expert = std::ssize(all) / slice_.experts;
  if (std::ssize(all) == 1 || per_expert == 0) return all[0];
  const std::int64_t second = per_expert == 2 && w.part == Projection::kUp ? 1 : 0;
  return all[static_cast<std::size_t>(numbers_before() * per_expert + second)];
}

Status MlpReader::read_tensor_scale(const Window& w, MatrixBuffers* m) {
  const ShardSet::Located& scale = *stored(TensorKind::kScale, w);
  MOESAIC_ASSIGN_OR_RETURN(const float value, read_number(TensorKind::kScale, w));
  MOESAIC_RETURN_IF_ERROR(check_f32_scales(
      {scale.info->name}, &value, 1, 1,
      [&](std::int64_t, std::int64_t) { return all_zero(rows_of(*m, w), w.rows * w.cols, 0x7F); }));
  tensor_scales_[static_cast<std::size_t>(w.part)] = value;
  return {};
}

Status MlpReader::read_row_scales(const Window& w, std::uint8_t magnitude, MatrixBuffers* m) {
  const ShardSet::Located& from = *stored(TensorKind::kScale, w);
  MOESAIC_ASSIGN_OR_RETURN(const Tensor scale, from.file->read_tensor(*from.info));
  float one = 0;
  if (format_.one_scale) {
    MOESAIC_ASSIGN_OR_RETURN(one, read_number(TensorKind::kScale, w));
  }
  float* to = m->scale.as<float>() + w.to;
  for (std::int64_t r = 0; r < w.rows; ++r) {
    const std::int64_t at = experts_before() * w.rows_all + w.first_row + r * w.row_step;
    to[r] = format_.one_scale ? one : load_as_f32(scale.data(), scale.dtype(), at);
    if (format_.stored == StoredFormat::kBnb8) to[r] /= 127.0F;  // SCB is the row's amax
  }
  return check_f32_scales(place(TensorKind::kScale, w, w.cols_all), to, w.rows, 1,
                          [&](std::int64_t r, std::int64_t) {
                            return all_zero(rows_of(*m, w) + r * w.cols, w.cols, magnitude);
                          });
}

std::uint8_t* MlpReader::scale_rows(MatrixBuffers& m, const Window& w) const {
  return m.scale.as<std::uint8_t>() + w.to * (w.cols / weight_.block_k);
}

Status MlpReader::read_group_bytes(const Window& w, MatrixBuffers* m) {
  return read_elements(TensorKind::kScale, w, reinterpret_cast<std::byte*>(scale_rows(*m, w)));
}

Status MlpReader::read_exponents(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_group_bytes(w, m));
  return check_e8m0_scales(place(TensorKind::kScale, w, weight_.block_k), scale_rows(*m, w), w.rows,
                           w.cols / weight_.block_k);
}

Status MlpReader::read_e4m3_scales(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_group_bytes(w, m));
  const std::int64_t groups = w.cols / weight_.block_k;
  const std::uint8_t* scales = scale_rows(*m, w);
  const Place where = place(TensorKind::kScale, w, weight_.block_k);
  MOESAIC_RETURN_IF_ERROR(check_e4m3_codes(where, scales, w.rows, groups));
  for (std::int64_t i = 0; i < w.rows * groups; ++i) {
    const bool negative = (scales[i] & 0x80) != 0 && scales[i] != 0x80;
    const std::uint8_t* codes = rows_of(*m, w) + i * weight_.block_k / 2;
    const bool hides = (scales[i] & 0x7F) == 0 && !all_zero(codes, weight_.block_k / 2, 0x77);
    if (!negative && !hides) continue;
    // Tiny blocks round to a zero scale in every quantiser; their codes are then zero as well.
    return bad_scale(where, load_as_f32(scales + i, DType::kF8E4M3, 0), i / groups, i % groups);
  }
  return {};
}

Status MlpReader::read_global_scale(const Window& w) {
  MOESAIC_ASSIGN_OR_RETURN(const float value, read_number(TensorKind::kGlobalScale, w));
  // compressed-tensors stores what the weights were multiplied with.
  const bool reciprocal = format_.names == NameStyle::kCompressed &&
                          !MOESAIC_FAULT(checkpoint_global_scale_not_inverted);
  const auto check = reciprocal ? &check_reciprocal : &check_positive;
  MOESAIC_RETURN_IF_ERROR(check(*stored(TensorKind::kGlobalScale, w), "global scale", value));
  global_scales_[static_cast<std::size_t>(w.part)] = reciprocal ? 1.0F / value : value;
  return {};
}

// --- scales of whole tensors ---

void MlpReader::write_tensor_scales() {
  if (weight_.granularity == ScaleGranularity::kTensor) {
    out_.w13.scale.as<float>()[0] = tensor_scales_[kW3];
    out_.w2.scale.as<float>()[0] = tensor_scales_[kW2];
    return;
  }
  const bool of_gate = MOESAIC_FAULT(checkpoint_tensor_scale_of_gate);
  write_rows(tensor_scales_, of_gate ? kW1 : kW3, &out_.w13.scale, &out_.w2.scale);
}

void MlpReader::write_rows(const std::array<float, 3>& numbers, std::size_t up, Tensor* w13,
                           Tensor* w2) {
  float* rows = w13->as<float>();
  if (slice_.gated) rows = std::fill_n(rows, slice_.count, numbers[kW1]);
  std::fill_n(rows, slice_.count, numbers[up]);
  std::fill_n(w2->as<float>(), slice_.hidden, numbers[kW2]);
}

void MlpReader::write_global_scales() {
  if (weight_.outer_scale == OuterScale::kTensor) {
    out_.w13.global_scale.as<float>()[0] = global_scales_[kW3];
    out_.w2.global_scale.as<float>()[0] = global_scales_[kW2];
    return;
  }
  const bool of_gate = MOESAIC_FAULT(checkpoint_global_scale_of_gate);
  write_rows(global_scales_, of_gate ? kW1 : kW3, &out_.w13.channel_scale, &out_.w2.channel_scale);
}

}  // namespace moesaic::checkpoint
