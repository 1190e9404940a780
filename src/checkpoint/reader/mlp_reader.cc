#include "checkpoint/reader/mlp_reader.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "checkpoint/reader/mlp_reader_impl.h"
#include "core/fault.h"
#include "numerics/element.h"

namespace moesaic::checkpoint {

// In the order of StoredFormat.
const std::array<MlpReader::Codec, kNumStoredFormats> MlpReader::kCodecs = {{
    {StoredFormat::kPlain, &MlpReader::read_plain, nullptr},
    {StoredFormat::kFp8Block, &MlpReader::read_fp8_block, nullptr},
    {StoredFormat::kMxfp4, &MlpReader::read_mxfp4, nullptr},
    {StoredFormat::kFp8Tensor, &MlpReader::read_fp8_tensor, &MlpReader::write_tensor_scales},
    {StoredFormat::kFp8Channel, &MlpReader::read_fp8_channel, nullptr},
    {StoredFormat::kMxfp8, &MlpReader::read_mxfp8, nullptr},
    {StoredFormat::kInt8Channel, &MlpReader::read_int8, nullptr},
    {StoredFormat::kPacked, &MlpReader::read_integers, nullptr},
    {StoredFormat::kGptq, &MlpReader::read_integers, nullptr},
    {StoredFormat::kAwq, &MlpReader::read_integers, nullptr},
    {StoredFormat::kNvfp4, &MlpReader::read_nvfp4, &MlpReader::write_global_scales},
    {StoredFormat::kMxfp4Linear, &MlpReader::read_mxfp4, nullptr},
    {StoredFormat::kBnb4, &MlpReader::read_bnb4, nullptr},
    {StoredFormat::kBnb8, &MlpReader::read_bnb8, nullptr},
    {StoredFormat::kGguf, &MlpReader::read_gguf, &MlpReader::write_gguf_scales},
}};

Status MlpReader::run(const InputScales& input_scales) {
  const Codec& codec = kCodecs[static_cast<std::size_t>(format_.stored)];
  if (codec.format != format_.stored) {
    return {StatusCode::kInternal, "the table of codecs is out of order"};
  }
  const MlpWindows windows = windows_of(slice_);
  // Down first: a rank's share of its columns may settle the order of the others' rows.
  MOESAIC_RETURN_IF_ERROR((this->*codec.read)(windows.down, &out_.w2));
  if (slice_.gated) MOESAIC_RETURN_IF_ERROR((this->*codec.read)(windows.gate, &out_.w13));
  MOESAIC_RETURN_IF_ERROR((this->*codec.read)(windows.up, &out_.w13));
  if (codec.finish != nullptr) (this->*codec.finish)();
  set_input_scales(input_scales, expert_, &out_);
  return slice_.has_bias ? read_biases(windows) : Status();
}

// --- where ---

std::int64_t MlpReader::experts_before() const {
  if (is_per_expert(slice_.storage)) return 0;
  return MOESAIC_FAULT(checkpoint_stacked_first_expert) ? 0 : expert_;
}

std::int64_t MlpReader::numbers_before() const {
  if (!slice_.scales_stacked) return experts_before();
  return MOESAIC_FAULT(checkpoint_stacked_number_of_first) ? 0 : expert_;
}

Result<const std::byte*> MlpReader::staged(TensorKind kind, std::int64_t row_elements,
                                           const Window& w, const Rectangle& part) {
  const ShardSet::Located& from = *stored(kind, w);
  StagedBytes& to = out_.staged[kind == TensorKind::kWeight ? 0 : 1];
  if (to.info == from.info && to.part == part) return to.bytes.data();
  to.info = nullptr;
  const std::int64_t bytes = part.rows * part.cols * dtype_bits(from.info->dtype) / 8;
  if (to.bytes.bytes() < bytes) {
    MOESAIC_ASSIGN_OR_RETURN(to.bytes, Tensor::uninitialized(DType::kU8, {bytes}));
  }
  MOESAIC_RETURN_IF_ERROR(read_rectangle(from, row_elements, part, to.bytes.data()));
  to.info = from.info;
  to.part = part;
  return to.bytes.data();
}

Status MlpReader::read_elements(TensorKind kind, const Window& w, std::byte* to) {
  const std::optional<std::int64_t> unit = columns_per_element(format_.stored, kind);
  if (!unit) return {StatusCode::kInternal, "a tensor that is read whole was asked for in part"};
  Window window = w;
  if (format_.stored == StoredFormat::kMxfp4 && kind == TensorKind::kScale && w.row_step > 1 &&
      MOESAIC_FAULT(checkpoint_mxfp4_scales_in_file_order)) {
    window.row_step = 1;
  }
  const std::int64_t step = window.row_step, cols = w.cols / *unit;
  const StoredPart from = part_of(window, *unit, experts_before());
  const bool keep = MOESAIC_FAULT(checkpoint_skip_transpose);
  if (!w.transposed && step == 1) {
    return read_rectangle(*stored(kind, w), from.row_elements, from.part, to);
  }
  // The window's rows come with those that take turns with them.
  MOESAIC_ASSIGN_OR_RETURN(const std::byte* raw, staged(kind, from.row_elements, w, from.part));
  const std::int64_t offset = w.first_row % step;
  const std::int64_t bytes = dtype_bits(stored(kind, w)->info->dtype) / 8;
  if (w.transposed) {
    if (keep) {
      std::memcpy(to, raw, static_cast<std::size_t>(w.rows * cols * bytes));
    } else {
      transpose_rows(raw, bytes, w.rows * step, offset, step, w.rows, cols, to);
    }
    return {};
  }
  const std::int64_t row_bytes = cols * bytes;
  for (std::int64_t r = 0; r < w.rows; ++r) {
    std::memcpy(to + r * row_bytes, raw + (offset + r * step) * row_bytes,
                static_cast<std::size_t>(row_bytes));
  }
  return {};
}

// --- biases ---

// One row per expert, [E, rows_all], or the expert's own [rows_all], widened.
Status MlpReader::read_bias(const Window& w, float* to) const {
  const ShardSet::Located& from = *stored(TensorKind::kBias, w);
  const std::int64_t span = (w.rows - 1) * w.row_step + 1;
  std::vector<std::byte> raw(static_cast<std::size_t>(span * dtype_bits(from.info->dtype) / 8));
  MOESAIC_RETURN_IF_ERROR(
      read_rectangle(from, w.rows_all, {experts_before(), 1, w.first_row, span}, raw.data()));
  for (std::int64_t r = 0; r < w.rows; ++r) {
    to[r] = load_as_f32(raw.data(), from.info->dtype, r * w.row_step);
  }
  return {};
}

Status MlpReader::read_biases(const MlpWindows& windows) {
  float* w13 = out_.w13_bias.as<float>();
  const bool swapped = is_fused(slice_.storage) && MOESAIC_FAULT(checkpoint_fused_bias_swapped);
  const Window &first = swapped ? windows.up : windows.gate,
               &second = swapped ? windows.gate : windows.up;
  if (slice_.gated) MOESAIC_RETURN_IF_ERROR(read_bias(first, w13 + windows.gate.to));
  MOESAIC_RETURN_IF_ERROR(read_bias(second, w13 + windows.up.to));
  if (slice_.with_down_bias || MOESAIC_FAULT(checkpoint_down_bias_on_every_rank)) {
    return read_bias(windows.down, out_.w2_bias.as<float>());
  }
  std::memset(out_.w2_bias.data(), 0, static_cast<std::size_t>(out_.w2_bias.bytes()));
  return {};
}

void set_input_scales(const InputScales& scales, std::int64_t expert, MlpBuffers* buffers) {
  if (!buffers->w13.input_scale.present()) return;
  const std::int64_t e = MOESAIC_FAULT(checkpoint_input_scale_of_first) ? 0 : expert;
  buffers->w13.input_scale.as<float>()[0] = scales.w13_of(e);
  buffers->w2.input_scale.as<float>()[0] = scales.w2_of(e);
}

Status read_mlp(const MlpTensors& tensors, const MlpSlice& slice, const InputScales& input_scales,
                std::int64_t expert, MlpBuffers* buffers) {
  return MlpReader(tensors, slice, expert, buffers).run(input_scales);
}

Result<Tensor> read_widened(const ShardSet::Located& tensor, const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(const Tensor stored, tensor.file->read_tensor(*tensor.info));
  MOESAIC_ASSIGN_OR_RETURN(Tensor wide, Tensor::uninitialized(DType::kF32, shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t n, shape.num_elements());
  for (std::int64_t i = 0; i < n; ++i) {
    wide.as<float>()[i] = load_as_f32(stored.data(), stored.dtype(), i);
  }
  return wide;
}

}  // namespace moesaic::checkpoint
