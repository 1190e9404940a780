#include "checkpoint/loader/quantized_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/loader/bnb_linear.h"
#include "checkpoint/loader/integer_linear.h"
#include "checkpoint/loader/value_checks.h"
#include "checkpoint/names.h"
#include "core/checked.h"
#include "core/fault.h"
#include "numerics/element.h"
#include "quant/bnb.h"
#include "quant/gguf_blocks.h"
#include "quant/int4_fp8.h"
#include "quant/int_packing.h"

namespace moesaic {
namespace {

constexpr std::size_t kW1 = 0, kW3 = 1, kW2 = 2;  // Projection

// The part of one stored linear [rows_all, cols_all] that goes into rows [to, to + rows) of a
// matrix.
struct Window {
  Projection part;
  Projection projection;  // whose tensors hold it: kGate for an up that is fused with gate
  std::int64_t rows_all, cols_all;
  std::int64_t first_row, rows, first_col, cols;
  std::int64_t to;
};

Status read_rectangle(const ShardSet::Located& from, std::int64_t first_row, std::int64_t rows,
                      std::int64_t first_col, std::int64_t cols, std::byte* dst) {
  const auto bytes = static_cast<std::size_t>(rows * cols * dtype_bits(from.info->dtype) / 8);
  return from.file->read_rows(*from.info, first_row, rows, first_col, cols, {dst, bytes});
}

// All elements of a small tensor.
Result<std::vector<float>> read_floats(const ShardSet::Located& from) {
  MOESAIC_ASSIGN_OR_RETURN(const Tensor stored, from.file->read_tensor(*from.info));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, stored.shape().num_elements());
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_as_f32(stored.data(), stored.dtype(), static_cast<std::int64_t>(i));
  }
  return values;
}

Status check_positive(const ShardSet::Located& from, std::string_view what, float value) {
  if (value > 0 && std::isfinite(value)) return {};
  return {StatusCode::kCorruptFile, fmt::format("{}: got {} {}, need a finite number > 0",
                                                quote_name(from.info->name), what, value)};
}

bool all_zero(const std::uint8_t* codes, std::int64_t n, std::uint8_t magnitude) {
  return std::all_of(codes, codes + n, [=](std::uint8_t c) { return (c & magnitude) == 0; });
}

class QuantizedReader {
 public:
  QuantizedReader(const MlpTensors& tensors, const QuantizedSlice& slice, std::int64_t expert,
                  QuantizedBuffers* out)
      : tensors_(tensors),
        slice_(slice),
        format_(slice.format),
        weight_(slice.scheme.weight),
        expert_(expert),
        out_(*out) {}

  Status run(const InputScales& input_scales) {
    const std::int64_t h = slice_.hidden, i = slice_.width;
    const std::int64_t first = MOESAIC_FAULT(checkpoint_quant_skip_tp_offset) ? 0 : slice_.first;
    const bool fused = is_fused(slice_.storage);
    constexpr Projection kGate = Projection::kGate, kDown = Projection::kDown;
    Window gate = {kGate, kGate, fused ? 2 * i : i, h, first, slice_.count, 0, h, 0};
    Window up = gate;
    up.part = Projection::kUp;
    if (fused) {
      if (!MOESAIC_FAULT(checkpoint_stacked_up_is_gate)) up.first_row += i;
      if (slice_.storage == ExpertStorage::kPerExpertUpFirst) {
        std::swap(gate.first_row, up.first_row);
      }
    } else {
      up.projection = Projection::kUp;
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

 private:
  const std::optional<ShardSet::Located>& stored(TensorKind kind, const Window& w) const {
    return tensors_.of(kind)[static_cast<std::size_t>(w.projection)];
  }
  std::string_view name(TensorKind kind, const Window& w) const {
    return stored(kind, w)->info->name;
  }
  Place place(TensorKind kind, const Window& w, std::int64_t column_unit) const {
    return {name(kind, w), w.first_row, w.first_col / column_unit};
  }

  Status read(const Window& w, MatrixBuffers* m) {
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
      case StoredFormat::kInt8Channel:
      case StoredFormat::kBnb8:
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

  std::uint8_t* rows_of(MatrixBuffers& m, const Window& w) const {
    return m.weight.as<std::uint8_t>() + w.to * w.cols * dtype_bits(weight_.dtype) / 8;
  }

  // Experts before this one in the tensors that hold all of them.
  std::int64_t experts_before() const {
    if (is_per_expert(slice_.storage)) return 0;
    return MOESAIC_FAULT(checkpoint_stacked_first_expert) ? 0 : expert_;
  }

  // Bytes that stand for `unit` columns each, of the window's rows.
  Status read_bytes(TensorKind kind, const Window& w, std::int64_t unit, std::uint8_t* to) {
    const ShardSet::Located& from = *stored(kind, w);
    const std::int64_t first = w.first_col / unit, cols = w.cols / unit;
    if (slice_.storage != ExpertStorage::kFusedNN) {
      return read_rectangle(from, experts_before() * w.rows_all + w.first_row, w.rows, first, cols,
                            reinterpret_cast<std::byte*>(to));
    }
    // [.., columns, rows] in the file.
    std::vector<std::uint8_t> raw(static_cast<std::size_t>(cols * w.rows));
    MOESAIC_RETURN_IF_ERROR(read_rectangle(from, experts_before() * (w.cols_all / unit) + first,
                                           cols, w.first_row, w.rows,
                                           reinterpret_cast<std::byte*>(raw.data())));
    const bool keep = MOESAIC_FAULT(checkpoint_stacked_not_transposed);
    for (std::int64_t i = 0; i < cols * w.rows; ++i) {
      to[keep ? i : i % w.rows * cols + i / w.rows] = raw[static_cast<std::size_t>(i)];
    }
    return {};
  }

  Status read_weight(const Window& w, std::int64_t codes_per_byte, MatrixBuffers* m) {
    return read_bytes(TensorKind::kWeight, w, codes_per_byte, rows_of(*m, w));
  }

  // A number that counts for a whole tensor: one for all experts, or each expert's own, or two of
  // each where gate and up are fused.
  Result<float> read_number(TensorKind kind, const Window& w) const {
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> all, read_floats(*stored(kind, w)));
    const auto per_expert = std::ssize(all) / slice_.experts;
    if (std::ssize(all) == 1 || per_expert == 0) return all[0];
    const std::int64_t second = per_expert == 2 && w.part == Projection::kUp ? 1 : 0;
    return all[static_cast<std::size_t>(experts_before() * per_expert + second)];
  }

  Status read_tensor_scale(const Window& w, MatrixBuffers* m) {
    const ShardSet::Located& scale = *stored(TensorKind::kScale, w);
    MOESAIC_ASSIGN_OR_RETURN(const float value, read_number(TensorKind::kScale, w));
    MOESAIC_RETURN_IF_ERROR(
        check_f32_scales({scale.info->name}, &value, 1, 1, [&](std::int64_t, std::int64_t) {
          return all_zero(rows_of(*m, w), w.rows * w.cols, 0x7F);
        }));
    tensor_scales_[static_cast<std::size_t>(w.part)] = value;
    return {};
  }

  // One multiplier per row, [N] or [N, 1] (stacked: with E before it); the rows of w2 are never
  // cut.
  Status read_row_scales(const Window& w, std::uint8_t magnitude, MatrixBuffers* m) {
    const ShardSet::Located& from = *stored(TensorKind::kScale, w);
    MOESAIC_ASSIGN_OR_RETURN(const Tensor scale, from.file->read_tensor(*from.info));
    float one = 0;
    if (format_.one_scale) {
      MOESAIC_ASSIGN_OR_RETURN(one, read_number(TensorKind::kScale, w));
    }
    float* to = m->scale.as<float>() + w.to;
    for (std::int64_t r = 0; r < w.rows; ++r) {
      const std::int64_t at = experts_before() * w.rows_all + w.first_row + r;
      to[r] = format_.one_scale ? one : load_as_f32(scale.data(), scale.dtype(), at);
      if (format_.stored == StoredFormat::kBnb8) to[r] /= 127.0F;  // SCB is the row's amax
    }
    return check_f32_scales(place(TensorKind::kScale, w, w.cols_all), to, w.rows, 1,
                            [&](std::int64_t r, std::int64_t) {
                              return all_zero(rows_of(*m, w) + r * w.cols, w.cols, magnitude);
                            });
  }

  std::uint8_t* scale_rows(MatrixBuffers& m, const Window& w) const {
    return m.scale.as<std::uint8_t>() + w.to * (w.cols / weight_.block_k);
  }

  Status read_group_bytes(const Window& w, MatrixBuffers* m) {
    return read_bytes(TensorKind::kScale, w, weight_.block_k, scale_rows(*m, w));
  }

  Status read_exponents(const Window& w, MatrixBuffers* m) {
    MOESAIC_RETURN_IF_ERROR(read_group_bytes(w, m));
    return check_e8m0_scales(place(TensorKind::kScale, w, weight_.block_k), scale_rows(*m, w),
                             w.rows, w.cols / weight_.block_k);
  }

  // NVFP4 block scales: e4m3, never negative.
  Status read_e4m3_scales(const Window& w, MatrixBuffers* m) {
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

  Status read_global_scale(const Window& w) {
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

  // One per matrix, or, where gate and up of some expert differ, one per row: nothing is rounded
  // a second time.
  void write_tensor_scales() {
    if (format_.stored != StoredFormat::kFp8Tensor) return;
    if (weight_.granularity == ScaleGranularity::kTensor) {
      out_.w13.scale.as<float>()[0] = tensor_scales_[kW3];
      out_.w2.scale.as<float>()[0] = tensor_scales_[kW2];
      return;
    }
    const bool of_gate = MOESAIC_FAULT(checkpoint_tensor_scale_of_gate);
    write_rows(tensor_scales_, of_gate ? kW1 : kW3, &out_.w13.scale, &out_.w2.scale);
  }

  // A number of each projection to all of its rows.
  void write_rows(const std::array<float, 3>& numbers, std::size_t up, Tensor* w13, Tensor* w2) {
    float* rows = w13->as<float>();
    if (slice_.gated) rows = std::fill_n(rows, slice_.count, numbers[kW1]);
    std::fill_n(rows, slice_.count, numbers[up]);
    std::fill_n(w2->as<float>(), slice_.hidden, numbers[kW2]);
  }

  // One per matrix, or, where gate and up of some expert differ, one per row.
  void write_global_scales() {
    if (format_.stored != StoredFormat::kNvfp4) return;
    if (weight_.outer_scale == OuterScale::kTensor) {
      out_.w13.global_scale.as<float>()[0] = global_scales_[kW3];
      out_.w2.global_scale.as<float>()[0] = global_scales_[kW2];
      return;
    }
    const bool of_gate = MOESAIC_FAULT(checkpoint_global_scale_of_gate);
    write_rows(global_scales_, of_gate ? kW1 : kW3, &out_.w13.channel_scale,
               &out_.w2.channel_scale);
  }

  // --- integers in words ---

  Status read_integers(const Window& w, MatrixBuffers* m) {
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

  Status write_perm(const IntegerLinear& linear, const Window& w, MatrixBuffers* m) {
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

  Status write_scales(const Window& w, const std::vector<float>& scales, std::int64_t groups,
                      MatrixBuffers* m) {
    if (weight_.scale_format != ScaleFormat::kE4M3) {
      std::copy(scales.begin(), scales.end(), m->scale.as<float>() + w.to * groups);
      return {};
    }
    // int4 with FP8 activations: group scales become e4m3 bytes and a channel scale.
    const ConstTensorView wide(reinterpret_cast<const std::byte*>(scales.data()), DType::kF32,
                               {w.rows, groups});
    const TensorView bytes(m->scale.data() + w.to * groups, DType::kF8E4M3, {w.rows, groups});
    const TensorView channel(m->channel_scale.data() + w.to * 4, DType::kF32, {w.rows});
    return split_int4_fp8_scales(wide, bytes, channel);
  }

  // One code per byte to the matrix's own width.
  Status write_codes(ConstTensorView codes, int bias, const Window& w, MatrixBuffers* m) {
    auto* to = reinterpret_cast<std::byte*>(rows_of(*m, w));
    if (dtype_bits(weight_.dtype) == 4) {
      return pack_nibbles(codes, bias, TensorView(to, DType::kU8, {w.rows, w.cols / 2}));
    }
    if (bias != 0) {
      return subtract_bias(codes, bias, TensorView(to, DType::kI8, {w.rows, w.cols}));
    }
    std::memcpy(to, codes.data, static_cast<std::size_t>(w.rows * w.cols));
    return {};
  }

  // --- bitsandbytes ---

  Status read_bnb4(const Window& w, MatrixBuffers* m) {
    MOESAIC_ASSIGN_OR_RETURN(
        const std::vector<float> absmax,
        read_bnb_absmax(tensors_, w.projection, format_, w.rows_all, w.cols_all));
    // The weight is one column of bytes; a row of the matrix is a run of them.
    const ShardSet::Located& from = *stored(TensorKind::kWeight, w);
    std::byte* to = reinterpret_cast<std::byte*>(rows_of(*m, w));
    const std::int64_t row_bytes = w.cols_all / 2, bytes = w.cols / 2;
    if (w.cols == w.cols_all) {
      MOESAIC_RETURN_IF_ERROR(
          read_rectangle(from, w.first_row * row_bytes, w.rows * row_bytes, 0, 1, to));
    } else {
      for (std::int64_t r = 0; r < w.rows; ++r) {
        MOESAIC_RETURN_IF_ERROR(read_rectangle(
            from, (w.first_row + r) * row_bytes + w.first_col / 2, bytes, 0, 1, to + r * bytes));
      }
    }
    const TensorView packed(to, DType::kU8, {w.rows, bytes});
    if (!MOESAIC_FAULT(checkpoint_bnb_nibbles_in_file_order)) {
      MOESAIC_RETURN_IF_ERROR(swap_nibbles(packed, packed));
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

  Status read_gguf(const Window& w, MatrixBuffers* m) {
    const ShardSet::Located& from = *stored(TensorKind::kWeight, w);
    const auto type = static_cast<GgufType>(from.info->block_type);
    const GgufTypeInfo& info = *gguf_type_info(static_cast<std::uint32_t>(type));
    const std::int64_t row_bytes = w.cols / info.block_elems * info.block_bytes;
    MOESAIC_ASSIGN_OR_RETURN(Tensor blocks, Tensor::uninitialized(DType::kU8, {w.rows, row_bytes}));
    MOESAIC_RETURN_IF_ERROR(read_rectangle(
        from, experts_before() * w.rows_all + w.first_row, w.rows,
        w.first_col / info.block_elems * info.block_bytes, row_bytes, blocks.data()));
    const std::int64_t groups = w.cols / info.group;
    MOESAIC_ASSIGN_OR_RETURN(Tensor codes, Tensor::uninitialized(DType::kI8, {w.rows, w.cols}));
    MOESAIC_ASSIGN_OR_RETURN(Tensor scale, Tensor::uninitialized(DType::kF32, {w.rows, groups}));
    Tensor min;
    if (info.has_min) {
      MOESAIC_ASSIGN_OR_RETURN(min, Tensor::uninitialized(DType::kF32, {w.rows, groups}));
    }
    const Status split = split_gguf(type, blocks.view(), codes.view(), scale.view(), min.view());
    if (!split.ok()) {
      return {StatusCode::kCorruptFile,
              fmt::format("{}: {}", quote_name(from.info->name), split.message())};
    }
    MOESAIC_RETURN_IF_ERROR(spread(scale, info.group, w, &m->scale, from.info->name));
    if (m->min.present())
      MOESAIC_RETURN_IF_ERROR(spread(min, info.group, w, &m->min, from.info->name));
    const bool as_unsigned = weight_.dtype == DType::kU4;
    return write_codes(
        ConstTensorView(codes.data(), as_unsigned ? DType::kU8 : DType::kI8, {w.rows, w.cols}), 0,
        w, m);
  }

  // Scales (or minima, zeros where a type has none) of groups of `group` columns to groups of the
  // matrix's size, which divides it.
  Status spread(const Tensor& from, std::int64_t group, const Window& w, Tensor* to,
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

  const MlpTensors& tensors_;
  const QuantizedSlice& slice_;
  const LinearFormat& format_;
  const OperandQuant& weight_;
  std::int64_t expert_;
  QuantizedBuffers& out_;
  std::array<float, 3> tensor_scales_{}, global_scales_{};
  std::vector<std::int32_t> row_order_;  // of gate and up, where w2's columns are reordered
};

}  // namespace

Result<InputScales> read_input_scales(const std::vector<MlpTensors>& experts,
                                      const LinearFormat& format) {
  InputScales scales;
  if (format.activation != ActivationQuant::kStatic) return scales;
  const bool reciprocal =
      format.names == NameStyle::kCompressed && format.stored == StoredFormat::kNvfp4;
  for (const MlpTensors& expert : experts) {
    for (const std::size_t p : {kW1, kW3, kW2}) {
      const auto& from = expert.of(TensorKind::kInputScale)[p];
      if (!from) continue;
      float& largest = p == kW2 ? scales.w2 : scales.w13;
      MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> values, read_floats(*from));
      for (const float value : values) {
        MOESAIC_RETURN_IF_ERROR(check_positive(*from, "input scale", value));
        largest = std::max(largest, reciprocal ? 1.0F / value : value);
      }
    }
  }
  return scales;
}

// Has any expert other numbers of this kind for gate than for up?
static Result<bool> numbers_differ(const std::vector<MlpTensors>& experts, TensorKind kind) {
  for (const MlpTensors& expert : experts) {
    const auto& scales = expert.of(kind);
    if (!scales[kW1]) continue;
    const TensorInfo& info = *scales[kW1]->info;
    MOESAIC_ASSIGN_OR_RETURN(const Tensor gate, scales[kW1]->file->read_tensor(info));
    if (scales[kW3]) {
      MOESAIC_ASSIGN_OR_RETURN(const Tensor up, scales[kW3]->file->read_tensor(*scales[kW3]->info));
      const auto same = [&] {
        return std::memcmp(gate.data(), up.data(), static_cast<std::size_t>(gate.bytes())) == 0;
      };
      if (gate.dtype() != up.dtype() || gate.bytes() != up.bytes() || !same()) return true;
    } else if (info.rank == 2 && info.shape[1] == 2) {
      for (std::int64_t i = 0; i < info.shape[0]; ++i) {  // [E, 2], gate and up of each expert
        const std::int64_t at = 2 * i;
        if (load_as_f32(gate.data(), gate.dtype(), at) !=
            load_as_f32(gate.data(), gate.dtype(), at + 1)) {
          return true;
        }
      }
    }
  }
  return false;
}

Status scheme_of_values(const std::vector<MlpTensors>& experts, const LinearFormat& format,
                        QuantScheme* scheme) {
  if (format.stored == StoredFormat::kNvfp4) {
    MOESAIC_ASSIGN_OR_RETURN(const bool differ, numbers_differ(experts, TensorKind::kGlobalScale));
    if (differ) scheme->weight.outer_scale = OuterScale::kChannel;
  }
  if (format.stored == StoredFormat::kFp8Tensor) {
    MOESAIC_ASSIGN_OR_RETURN(const bool differ, numbers_differ(experts, TensorKind::kScale));
    if (differ) scheme->weight.granularity = ScaleGranularity::kChannel;
  }
  if (format.act_order) {
    MOESAIC_ASSIGN_OR_RETURN(const bool differ, numbers_differ(experts, TensorKind::kGroupIndex));
    if (differ) {
      MOESAIC_ASSIGN_OR_RETURN(*scheme, linear_scheme({}, DType::kF32));
    }
  }
  return {};
}

Result<MatrixBuffers> MatrixBuffers::make(const QuantScheme& scheme, std::int64_t rows,
                                          std::int64_t columns) {
  const OperandQuant& w = scheme.weight;
  const OperandQuant& a = scheme.activation;
  MatrixBuffers m;
  const auto allocate = [](Tensor* t, DType dtype, const Shape& shape) -> Status {
    MOESAIC_ASSIGN_OR_RETURN(*t, Tensor::uninitialized(dtype, shape));
    return {};
  };
  MOESAIC_RETURN_IF_ERROR(allocate(&m.weight, w.dtype, {rows, columns}));
  Shape shape = {1};
  if (w.granularity == ScaleGranularity::kChannel) shape = {rows};
  if (w.granularity == ScaleGranularity::kGroup) shape = {rows, ceil_div(columns, w.block_k)};
  const DType dtype = w.scale_format == ScaleFormat::kE8M0   ? DType::kF8E8M0
                      : w.scale_format == ScaleFormat::kE4M3 ? DType::kF8E4M3
                                                             : DType::kF32;
  MOESAIC_RETURN_IF_ERROR(allocate(&m.scale, dtype, shape));
  if (w.zero_point == ZeroPoint::kInteger) {
    MOESAIC_RETURN_IF_ERROR(allocate(&m.zero, DType::kU8, shape));
  }
  if (w.zero_point == ZeroPoint::kMin) {
    MOESAIC_RETURN_IF_ERROR(allocate(&m.min, DType::kF32, shape));
  }
  if (w.outer_scale == OuterScale::kTensor) {
    MOESAIC_RETURN_IF_ERROR(allocate(&m.global_scale, DType::kF32, {1}));
  }
  if (w.outer_scale == OuterScale::kChannel) {
    MOESAIC_RETURN_IF_ERROR(allocate(&m.channel_scale, DType::kF32, {rows}));
  }
  if (w.act_order) MOESAIC_RETURN_IF_ERROR(allocate(&m.perm, DType::kI32, {columns}));
  const bool fixed_input = (a.granularity == ScaleGranularity::kTensor && !a.dynamic) ||
                           a.outer_scale == OuterScale::kTensor;
  if (fixed_input) MOESAIC_RETURN_IF_ERROR(allocate(&m.input_scale, DType::kF32, {1}));
  return m;
}

std::int64_t MatrixBuffers::bytes() const {
  return weight.bytes() + scale.bytes() + zero.bytes() + min.bytes() + global_scale.bytes() +
         channel_scale.bytes() + input_scale.bytes() + perm.bytes();
}

Result<QuantizedBuffers> QuantizedBuffers::make(const QuantizedSlice& s) {
  QuantizedBuffers b;
  MOESAIC_ASSIGN_OR_RETURN(b.w13,
                           MatrixBuffers::make(s.scheme, (s.gated ? 2 : 1) * s.count, s.hidden));
  MOESAIC_ASSIGN_OR_RETURN(b.w2, MatrixBuffers::make(s.scheme, s.hidden, s.count));
  return b;
}

ExpertWeightsView view_of(const QuantizedBuffers& b) {
  const auto view = [](const Tensor& t) { return t.present() ? t.view() : ConstTensorView(); };
  ExpertWeightsView v;
  v.w13 = view(b.w13.weight);
  v.w2 = view(b.w2.weight);
  v.w13_scale = view(b.w13.scale);
  v.w2_scale = view(b.w2.scale);
  v.w13_global_scale = view(b.w13.global_scale);
  v.w2_global_scale = view(b.w2.global_scale);
  v.w13_channel_scale = view(b.w13.channel_scale);
  v.w2_channel_scale = view(b.w2.channel_scale);
  v.w13_zero = view(b.w13.zero);
  v.w2_zero = view(b.w2.zero);
  v.w13_min = view(b.w13.min);
  v.w2_min = view(b.w2.min);
  v.w13_input_scale = view(b.w13.input_scale);
  v.w2_input_scale = view(b.w2.input_scale);
  v.w13_perm = view(b.w13.perm);
  v.w2_perm = view(b.w2.perm);
  return v;
}

Status read_quantized_mlp(const MlpTensors& tensors, const QuantizedSlice& slice,
                          const InputScales& input_scales, std::int64_t expert,
                          QuantizedBuffers* buffers) {
  return QuantizedReader(tensors, slice, expert, buffers).run(input_scales);
}

}  // namespace moesaic
