#include "checkpoint/reader/quantized_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/container/names.h"
#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/quantized_reader_impl.h"
#include "core/fault.h"
#include "numerics/element.h"

namespace moesaic {
namespace {

bool all_zero(const std::uint8_t* codes, std::int64_t n, std::uint8_t magnitude) {
  return std::all_of(codes, codes + n, [=](std::uint8_t c) { return (c & magnitude) == 0; });
}

}  // namespace

Status QuantizedReader::run(const InputScales& input_scales) {
  const std::int64_t h = slice_.hidden, i = slice_.width;
  const std::int64_t first = MOESAIC_FAULT(checkpoint_quant_skip_tp_offset) ? 0 : slice_.first;
  const bool fused = is_fused(slice_.storage);
  using enum Projection;
  Window gate = {kGate, kGate, fused ? 2 * i : i, h, first, slice_.count, 0, h, 0};
  Window up = gate;
  up.part = kUp;
  if (fused) {
    if (!MOESAIC_FAULT(checkpoint_stacked_up_is_gate)) up.first_row += i;
    if (slice_.storage == ExpertStorage::kPerExpertUpFirst) {
      std::swap(gate.first_row, up.first_row);
    }
    if (slice_.storage == ExpertStorage::kFusedNNInterleaved) {
      gate.row_step = up.row_step = 2;
      gate.first_row = 2 * first;
      up.first_row = 2 * first + (MOESAIC_FAULT(checkpoint_interleaved_up_is_gate) ? 0 : 1);
    }
  } else {
    up.projection = kUp;
  }
  if (slice_.gated) up.to = slice_.count;
  const Window down = {kDown, kDown, h, i, 0, h, first, slice_.count, 0};
  MOESAIC_RETURN_IF_ERROR(read(down, &out_.w2));
  if (slice_.gated) MOESAIC_RETURN_IF_ERROR(read(gate, &out_.w13));
  MOESAIC_RETURN_IF_ERROR(read(up, &out_.w13));
  write_tensor_scales();
  write_global_scales();
  if (out_.w13.input_scale.present()) {
    out_.w13.input_scale.as<float>()[0] = input_scales.w13;
    out_.w2.input_scale.as<float>()[0] = input_scales.w2;
  }
  return {};
}

Status QuantizedReader::read(const Window& w, MatrixBuffers* m) {
  switch (format_.stored) {
    case StoredFormat::kFp8Tensor:
    case StoredFormat::kFp8Channel:
    case StoredFormat::kMxfp8:
      MOESAIC_RETURN_IF_ERROR(read_weight(w, 1, m));
      MOESAIC_RETURN_IF_ERROR(
          check_e4m3_codes(place(TensorKind::kWeight, w, 1), rows_of(*m, w), w.rows, w.cols));
      if (format_.stored == StoredFormat::kMxfp8) return read_exponents(w, m);
      return format_.stored == StoredFormat::kFp8Tensor ? read_tensor_scale(w, m)
                                                        : read_row_scales(w, 0x7F, m);
    case StoredFormat::kBnb8:
      MOESAIC_RETURN_IF_ERROR(check_row_format(w));
      [[fallthrough]];
    case StoredFormat::kInt8Channel:
      MOESAIC_RETURN_IF_ERROR(read_weight(w, 1, m));
      return read_row_scales(w, 0xFF, m);
    case StoredFormat::kNvfp4:
      MOESAIC_RETURN_IF_ERROR(read_weight(w, 2, m));
      MOESAIC_RETURN_IF_ERROR(read_e4m3_scales(w, m));
      return read_global_scale(w);
    case StoredFormat::kMxfp4Linear:
      MOESAIC_RETURN_IF_ERROR(read_weight(w, 2, m));
      return read_exponents(w, m);
    case StoredFormat::kPacked:
    case StoredFormat::kGptq:
    case StoredFormat::kAwq:
      return read_integers(w, m);
    case StoredFormat::kBnb4:
      return read_bnb4(w, m);
    case StoredFormat::kGguf:
      return read_gguf(w, m);
    default:
      return {StatusCode::kInternal, "not a format of this reader"};
  }
}

// --- codes that are stored as they are used ---

std::uint8_t* QuantizedReader::rows_of(MatrixBuffers& m, const Window& w) const {
  return m.weight.as<std::uint8_t>() + w.to * w.cols * dtype_bits(weight_.dtype) / 8;
}

std::int64_t QuantizedReader::experts_before() const {
  if (is_per_expert(slice_.storage)) return 0;
  return MOESAIC_FAULT(checkpoint_stacked_first_expert) ? 0 : expert_;
}

std::int64_t QuantizedReader::numbers_before() const {
  if (!slice_.scales_stacked) return experts_before();
  return MOESAIC_FAULT(checkpoint_stacked_number_of_first) ? 0 : expert_;
}

Status QuantizedReader::check_row_format(const Window& w) const {
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

Status QuantizedReader::read_bytes(TensorKind kind, const Window& w, std::int64_t unit,
                                   std::uint8_t* to) {
  const ShardSet::Located& from = *stored(kind, w);
  const std::int64_t first = w.first_col / unit, cols = w.cols / unit;
  if (!is_columnwise(slice_.storage)) {
    return read_rectangle(from, experts_before() * w.rows_all + w.first_row, w.rows, first, cols,
                          reinterpret_cast<std::byte*>(to));
  }
  // [.., columns, rows] in the file.
  const std::int64_t width = (w.rows - 1) * w.row_step + 1;
  std::vector<std::uint8_t> raw(static_cast<std::size_t>(cols * width));
  MOESAIC_RETURN_IF_ERROR(read_rectangle(from, experts_before() * (w.cols_all / unit) + first, cols,
                                         w.first_row, width,
                                         reinterpret_cast<std::byte*>(raw.data())));
  const bool keep = MOESAIC_FAULT(checkpoint_stacked_not_transposed);
  for (std::int64_t c = 0, i = 0; c < cols; ++c) {
    for (std::int64_t r = 0; r < w.rows; ++r, ++i) {
      to[keep ? i : r * cols + c] = raw[static_cast<std::size_t>(c * width + r * w.row_step)];
    }
  }
  return {};
}

Status QuantizedReader::read_weight(const Window& w, std::int64_t codes_per_byte,
                                    MatrixBuffers* m) {
  return read_bytes(TensorKind::kWeight, w, codes_per_byte, rows_of(*m, w));
}

Result<float> QuantizedReader::read_number(TensorKind kind, const Window& w) const {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> all, read_floats(*stored(kind, w)));
  const auto per_expert = std::ssize(all) / slice_.experts;
  if (std::ssize(all) == 1 || per_expert == 0) return all[0];
  const std::int64_t second = per_expert == 2 && w.part == Projection::kUp ? 1 : 0;
  return all[static_cast<std::size_t>(numbers_before() * per_expert + second)];
}

Status QuantizedReader::read_tensor_scale(const Window& w, MatrixBuffers* m) {
  const ShardSet::Located& scale = *stored(TensorKind::kScale, w);
  MOESAIC_ASSIGN_OR_RETURN(const float value, read_number(TensorKind::kScale, w));
  MOESAIC_RETURN_IF_ERROR(check_f32_scales(
      {scale.info->name}, &value, 1, 1,
      [&](std::int64_t, std::int64_t) { return all_zero(rows_of(*m, w), w.rows * w.cols, 0x7F); }));
  tensor_scales_[static_cast<std::size_t>(w.part)] = value;
  return {};
}

Status QuantizedReader::read_row_scales(const Window& w, std::uint8_t magnitude, MatrixBuffers* m) {
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

std::uint8_t* QuantizedReader::scale_rows(MatrixBuffers& m, const Window& w) const {
  return m.scale.as<std::uint8_t>() + w.to * (w.cols / weight_.block_k);
}

Status QuantizedReader::read_group_bytes(const Window& w, MatrixBuffers* m) {
  return read_bytes(TensorKind::kScale, w, weight_.block_k, scale_rows(*m, w));
}

Status QuantizedReader::read_exponents(const Window& w, MatrixBuffers* m) {
  MOESAIC_RETURN_IF_ERROR(read_group_bytes(w, m));
  return check_e8m0_scales(place(TensorKind::kScale, w, weight_.block_k), scale_rows(*m, w), w.rows,
                           w.cols / weight_.block_k);
}

Status QuantizedReader::read_e4m3_scales(const Window& w, MatrixBuffers* m) {
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

Status QuantizedReader::read_global_scale(const Window& w) {
  MOESAIC_ASSIGN_OR_RETURN(const float value, read_number(TensorKind::kGlobalScale, w));
  MOESAIC_RETURN_IF_ERROR(
      check_positive(*stored(TensorKind::kGlobalScale, w), "global scale", value));
  // compressed-tensors stores what the weights were multiplied with.
  const bool reciprocal = format_.names == NameStyle::kCompressed &&
                          !MOESAIC_FAULT(checkpoint_global_scale_not_inverted);
  global_scales_[static_cast<std::size_t>(w.part)] = reciprocal ? 1.0F / value : value;
  return {};
}

// --- scales of whole tensors ---

void QuantizedReader::write_tensor_scales() {
  if (format_.stored != StoredFormat::kFp8Tensor) return;
  if (weight_.granularity == ScaleGranularity::kTensor) {
    out_.w13.scale.as<float>()[0] = tensor_scales_[kW3];
    out_.w2.scale.as<float>()[0] = tensor_scales_[kW2];
    return;
  }
  const bool of_gate = MOESAIC_FAULT(checkpoint_tensor_scale_of_gate);
  write_rows(tensor_scales_, of_gate ? kW1 : kW3, &out_.w13.scale, &out_.w2.scale);
}

void QuantizedReader::write_rows(const std::array<float, 3>& numbers, std::size_t up, Tensor* w13,
                                 Tensor* w2) {
  float* rows = w13->as<float>();
  if (slice_.gated) rows = std::fill_n(rows, slice_.count, numbers[kW1]);
  std::fill_n(rows, slice_.count, numbers[up]);
  std::fill_n(w2->as<float>(), slice_.hidden, numbers[kW2]);
}

void QuantizedReader::write_global_scales() {
  if (format_.stored != StoredFormat::kNvfp4) return;
  if (weight_.outer_scale == OuterScale::kTensor) {
    out_.w13.global_scale.as<float>()[0] = global_scales_[kW3];
    out_.w2.global_scale.as<float>()[0] = global_scales_[kW2];
    return;
  }
  const bool of_gate = MOESAIC_FAULT(checkpoint_global_scale_of_gate);
  write_rows(global_scales_, of_gate ? kW1 : kW3, &out_.w13.channel_scale, &out_.w2.channel_scale);
}

Status read_quantized_mlp(const MlpTensors& tensors, const QuantizedSlice& slice,
                          const InputScales& input_scales, std::int64_t expert,
                          QuantizedBuffers* buffers) {
  return QuantizedReader(tensors, slice, expert, buffers).run(input_scales);
}

}  // namespace moesaic
