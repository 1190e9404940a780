// Codecs of formats that pack codes into words or blocks: GPTQ, AWQ and packed
// integers, bitsandbytes, GGUF.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint/container/names.h"
#include "checkpoint/reader/bnb_linear.h"
#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/mlp_reader_impl.h"
#include "core/checked.h"
#include "core/fault.h"
#include "numerics/integer.h"
#include "quant/bnb.h"
#include "quant/gguf_blocks.h"
#include "quant/int4_fp8.h"
#include "quant/int_packing.h"

namespace moesaic::checkpoint {

// --- integers in words ---

Status MlpReader::read_integers(const Window& w, MatrixBuffers* m) {
  MOESAIC_ASSIGN_OR_RETURN(
      const IntegerLinear linear,
      read_integer_linear(tensors_, w.projection, format_, w.rows_all, w.cols_all));
  const bool down = w.projection == Projection::kDown;
  MOESAIC_RETURN_IF_ERROR(write_perm(linear, w, m));
  // A slice of w2 takes its columns in the order of the groups, so that groups stay whole; the
  // rows of gate and up follow, and the intermediate needs no gathering.
  const bool sliced = slice_.count != slice_.width;
  if (down && sliced) row_order_ = linear.perm;

  MOESAIC_ASSIGN_OR_RETURN(Tensor part, Tensor::uninitialized(DType::kU8, {w.rows, w.cols}));
  const std::int64_t group = format_.group_size > 0 ? format_.group_size : w.cols_all;
  const std::int64_t groups = ceil_div(w.cols, group), first_group = w.first_col / group;
  std::vector<float> scales(static_cast<std::size_t>(w.rows * groups));
  auto* zeros = m->zero.present() ? m->zero.as<std::uint8_t>() + w.to * groups : nullptr;
  for (std::int64_t r = 0; r < w.rows; ++r) {
    std::int64_t row = w.first_row + r;
    if (!down && sliced && !row_order_.empty()) row = row_order_[static_cast<std::size_t>(row)];
    const std::uint8_t* from = linear.codes.as<std::uint8_t>() + row * linear.columns;
    std::uint8_t* to = part.as<std::uint8_t>() + r * w.cols;
    if (linear.perm.empty()) {
      std::memcpy(to, from + w.first_col, static_cast<std::size_t>(w.cols));
    } else {
      const std::int32_t* perm = linear.perm.data() + w.first_col;
      for (std::int64_t c = 0; c < w.cols; ++c) to[c] = from[perm[c]];
    }
    const std::int64_t at = row * linear.groups + first_group;
    std::copy_n(linear.scales.begin() + at, groups, scales.begin() + r * groups);
    if (zeros != nullptr) {
      std::copy_n(linear.zeros.as<std::uint8_t>() + at, groups, zeros + r * groups);
    }
  }
  MOESAIC_RETURN_IF_ERROR(write_scales(w, scales, groups, m));
  const int bias = format_.zero_points ? 0 : 1 << (format_.bits - 1);
  return write_codes(part.view(), bias, w, m);
}

Status MlpReader::write_perm(const IntegerLinear& linear, const Window& w, MatrixBuffers* m) {
  if (!weight_.act_order) return {};
  auto* perm = m->perm.as<std::int32_t>();
  const bool identity =
      linear.perm.empty() || (w.projection == Projection::kDown && slice_.count != slice_.width);
  std::vector<std::int32_t> order(static_cast<std::size_t>(w.cols));
  for (std::int64_t c = 0; c < w.cols; ++c) {
    order[static_cast<std::size_t>(c)] =
        identity ? static_cast<std::int32_t>(c) : linear.perm[static_cast<std::size_t>(c)];
  }
  const bool second = w.projection == Projection::kUp && slice_.gated;
  if (second && !std::equal(order.begin(), order.end(), perm)) {
    return {StatusCode::kUnsupported,
            fmt::format("{}: its group index differs from that of the gate projection, need the "
                        "same",
                        quote_name(name(TensorKind::kGroupIndex, w)))};
  }
  if (!MOESAIC_FAULT(checkpoint_forget_act_order)) {
    std::copy(order.begin(), order.end(), perm);
  } else {
    for (std::int64_t c = 0; c < w.cols; ++c) perm[c] = static_cast<std::int32_t>(c);
  }
  return {};
}

Status MlpReader::write_scales(const Window& w, const std::vector<float>& scales,
                               std::int64_t groups, MatrixBuffers* m) {
  if (weight_.scale_format != ScaleFormat::kE4M3) {
    std::copy(scales.begin(), scales.end(), m->scale.as<float>() + w.to * groups);
    return {};
  }
  // int4 with FP8 activations: group scales become e4m3 bytes and a channel scale.
  const ConstTensorView wide(reinterpret_cast<const std::byte*>(scales.data()), DType::kF32,
                             {w.rows, groups});
  const TensorView bytes(m->scale.data() + w.to * groups, DType::kF8E4M3, {w.rows, groups});
  const TensorView channel(m->channel_scale.data() + w.to * 4, DType::kF32, {w.rows});
  const Status split = quant::split_int4_fp8_scales(wide, bytes, channel);
  if (split.ok()) return {};
  return {split.code(),
          fmt::format("{}: {}", quote_name(name(TensorKind::kScale, w)), split.message())};
}

Status MlpReader::write_codes(ConstTensorView codes, int bias, const Window& w, MatrixBuffers* m) {
  auto* to = reinterpret_cast<std::byte*>(rows_of(*m, w));
  if (dtype_bits(weight_.dtype) == 4) {
    return quant::pack_nibbles(codes, bias, TensorView(to, DType::kU8, {w.rows, w.cols / 2}));
  }
  if (bias != 0) {
    return quant::subtract_bias(codes, bias, TensorView(to, DType::kI8, {w.rows, w.cols}));
  }
  std::memcpy(to, codes.data, static_cast<std::size_t>(w.rows * w.cols));
  return {};
}

// --- bitsandbytes ---

Status MlpReader::read_bnb4(const Window& w, MatrixBuffers* m) {
  MOESAIC_ASSIGN_OR_RETURN(
      const std::vector<float> absmax,
      read_bnb_absmax(tensors_, w.projection, format_, w.rows_all, w.cols_all));
  // The weight is one column of bytes; a row of the matrix is a run of them.
  const ShardSet::Located& from = *stored(TensorKind::kWeight, w);
  std::byte* to = reinterpret_cast<std::byte*>(rows_of(*m, w));
  const std::int64_t bytes = w.cols / 2;
  const StoredPart rows = part_of(w, 2, 0);
  MOESAIC_RETURN_IF_ERROR(read_rectangle(from, rows.row_elements, rows.part, to));
  const TensorView packed(to, DType::kU8, {w.rows, bytes});
  if (!MOESAIC_FAULT(checkpoint_bnb_nibbles_in_file_order)) {
    MOESAIC_RETURN_IF_ERROR(quant::swap_nibbles(packed, packed));
  }
  const std::int64_t block = format_.group_size;
  const std::int64_t groups_all = w.cols_all / block, groups = w.cols / block;
  for (std::int64_t r = 0; r < w.rows; ++r) {
    std::copy_n(absmax.begin() + (w.first_row + r) * groups_all + w.first_col / block, groups,
                m->scale.as<float>() + (w.to + r) * groups);
  }
  return {};
}

// --- GGUF ---

Status MlpReader::read_gguf(const Window& w, MatrixBuffers* m) {
  const ShardSet::Located& from = *stored(TensorKind::kWeight, w);
  const quant::GgufType type = from.info->block_type;
  const quant::GgufTypeInfo& info = *quant::gguf_type_info(static_cast<std::uint32_t>(type));
  const std::int64_t row_bytes = w.cols / info.block_elems * info.block_bytes;
  MOESAIC_ASSIGN_OR_RETURN(Tensor blocks, Tensor::uninitialized(DType::kU8, {w.rows, row_bytes}));
  MOESAIC_RETURN_IF_ERROR(
      read_rectangle(from, w.cols_all / info.block_elems * info.block_bytes,
                     {experts_before() * w.rows_all + w.first_row, w.rows,
                      w.first_col / info.block_elems * info.block_bytes, row_bytes},
                     blocks.data()));
  const auto corrupt = [&](const Status& status) {
    return Status(StatusCode::kCorruptFile,
                  fmt::format("{}: {}", quote_name(from.info->name), status.message()));
  };
  const std::int64_t groups = w.cols / info.group;
  if (weight_.dtype == DType::kF4E2M1) {
    const TensorView codes(reinterpret_cast<std::byte*>(rows_of(*m, w)), weight_.dtype,
                           {w.rows, w.cols});
    const TensorView scale(reinterpret_cast<std::byte*>(scale_rows(*m, w)), m->scale.dtype(),
                           {w.rows, groups});
    const Status same = quant::fp4_from_gguf(type, blocks.view(), codes, scale);
    if (!same.ok()) return corrupt(same);
    MOESAIC_ASSIGN_OR_RETURN(global_scales_[static_cast<std::size_t>(w.part)], read_gguf_scale(w));
    return {};
  }
  MOESAIC_ASSIGN_OR_RETURN(Tensor codes, Tensor::uninitialized(DType::kI8, {w.rows, w.cols}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor scale, Tensor::uninitialized(DType::kF32, {w.rows, groups}));
  Tensor min;
  if (info.has_min) {
    MOESAIC_ASSIGN_OR_RETURN(min, Tensor::uninitialized(DType::kF32, {w.rows, groups}));
  }
  const Status split =
      quant::split_gguf(type, blocks.view(), codes.view(), scale.view(), min.view());
  if (!split.ok()) return corrupt(split);
  MOESAIC_ASSIGN_OR_RETURN(const float outer, read_gguf_scale(w));
  if (outer != 1.0F) {
    for (Tensor* numbers : {&scale, &min}) {
      if (!numbers->present()) continue;
      float* values = numbers->as<float>();
      std::transform(values, values + w.rows * groups, values,
                     [=](float value) { return value * outer; });
    }
  }
  MOESAIC_RETURN_IF_ERROR(spread(scale, info.group, w, &m->scale, from.info->name));
  if (m->min.present())
    MOESAIC_RETURN_IF_ERROR(spread(min, info.group, w, &m->min, from.info->name));
  if (weight_.table == CodeTable::kIq4Nl && !MOESAIC_FAULT(checkpoint_iq4_values_as_codes)) {
    auto* code = codes.as<std::int8_t>();
    for (std::int64_t i = 0; i < w.rows * w.cols; ++i) {
      code[i] = static_cast<std::int8_t>(iq4nl_from_entry(code[i]));
    }
  }
  const bool as_unsigned = weight_.dtype == DType::kU4;
  return write_codes(
      ConstTensorView(codes.data(), as_unsigned ? DType::kU8 : DType::kI8, {w.rows, w.cols}), 0, w,
      m);
}

// The numbers beside blocks of NVFP4 are its global scales; into others they are multiplied.
void MlpReader::write_gguf_scales() {
  if (weight_.outer_scale != OuterScale::kNone) write_global_scales();
}

Result<float> MlpReader::read_gguf_scale(const Window& w) const {
  const auto& from = stored(TensorKind::kGlobalScale, w);
  if (!from || MOESAIC_FAULT(checkpoint_gguf_scale_ignored)) return 1.0F;
  MOESAIC_ASSIGN_OR_RETURN(const float value, read_number(TensorKind::kGlobalScale, w));
  MOESAIC_RETURN_IF_ERROR(check_positive(*from, "scale", value));
  return value;
}

Status MlpReader::spread(const Tensor& from, std::int64_t group, const Window& w, Tensor* to,
                         std::string_view tensor_name) const {
  const std::int64_t groups = w.cols / weight_.block_k, each = group / weight_.block_k;
  float* out = to->as<float>() + w.to * groups;
  for (std::int64_t i = 0; i < w.rows * groups; ++i) {
    const std::int64_t row = i / groups, at = i % groups / each;
    out[i] = from.present() ? from.as<float>()[row * (w.cols / group) + at] : 0.0F;
    if (std::isfinite(out[i])) continue;
    return {StatusCode::kCorruptFile,
            fmt::format("{}: got scale {} at row {} of expert {}, block {}, need a finite number",
                        quote_name(tensor_name), out[i], w.first_row + row, expert_,
                        (w.first_col + at * group) / group)};
  }
  return {};
}

}  // namespace moesaic::checkpoint
