#include "checkpoint/reader/mlp_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "checkpoint/binding/layer_plan.h"
#include "checkpoint/reader/fp8_checks.h"
#include "core/checked.h"
#include "core/fault.h"
#include "numerics/element.h"

namespace moesaic {
namespace {

constexpr auto kGateIndex = static_cast<std::size_t>(Projection::kGate);
constexpr auto kUpIndex = static_cast<std::size_t>(Projection::kUp);
constexpr auto kDownIndex = static_cast<std::size_t>(Projection::kDown);

std::int64_t element_bytes(DType dtype) { return dtype_bits(dtype) / 8; }

// A rectangle of a stored tensor seen as a matrix [product of leading dimensions, last dimension].
struct Rectangle {
  std::int64_t first_row, rows, first_col, cols;
};

Status read_rectangle(const ShardSet::Located& from, const Rectangle& r, std::byte* dst) {
  const auto bytes = static_cast<std::size_t>(r.rows * r.cols * element_bytes(from.info->dtype));
  return from.file->read_rows(*from.info, r.first_row, r.rows, r.first_col, r.cols, {dst, bytes});
}

// Weights of the layer's dtype; of others (then it is F32) widened.
Status read_weights(const ShardSet::Located& from, const Rectangle& r, DType dtype,
                    std::byte* dst) {
  if (from.info->dtype == dtype) return read_rectangle(from, r, dst);
  std::vector<std::byte> stored(
      static_cast<std::size_t>(r.rows * r.cols * element_bytes(from.info->dtype)));
  MOESAIC_RETURN_IF_ERROR(read_rectangle(from, r, stored.data()));
  for (std::int64_t i = 0; i < r.rows * r.cols; ++i) {
    const float value = load_as_f32(stored.data(), from.info->dtype, i);
    std::memcpy(dst + i * std::int64_t{sizeof(float)}, &value, sizeof(float));
  }
  return {};
}

// The same, widened to F32. `scratch` has room for as many F32 elements.
Status read_rectangle_widened(const ShardSet::Located& from, const Rectangle& r, Tensor* scratch,
                              float* dst) {
  MOESAIC_RETURN_IF_ERROR(read_rectangle(from, r, scratch->data()));
  for (std::int64_t i = 0; i < r.rows * r.cols; ++i) {
    dst[i] = load_as_f32(scratch->data(), from.info->dtype, i);
  }
  return {};
}

// A part of a grid of scales with `all_cols` columns, widened. The grid may be stored with its
// blocks' own axes, [rows, 1, columns, 1].
Status read_scale_grid(const ShardSet::Located& from, const Rectangle& r, std::int64_t all_cols,
                       Tensor* scratch, float* dst) {
  if (from.info->rank != 4) return read_rectangle_widened(from, r, scratch, dst);
  for (std::int64_t row = 0; row < r.rows; ++row) {
    MOESAIC_RETURN_IF_ERROR(
        read_rectangle_widened(from, {(r.first_row + row) * all_cols + r.first_col, r.cols, 0, 1},
                               scratch, dst + row * r.cols));
  }
  return {};
}

// dst[target(c)][r] = src[r][c] for src [rows, cols], tile by tile so that both sides stay in
// cache.
template <class Element, class Target>
void transpose(const std::byte* src_bytes, std::byte* dst_bytes, std::int64_t rows,
               std::int64_t cols, const Target& target) {
  constexpr std::int64_t kTile = 64;  // 64 x 64 x 4 bytes: half of a 32 KiB first-level cache
  const auto* src = reinterpret_cast<const Element*>(src_bytes);
  auto* dst = reinterpret_cast<Element*>(dst_bytes);
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (std::int64_t c0 = 0; c0 < cols; c0 += kTile) {
      for (std::int64_t c = c0; c < std::min(c0 + kTile, cols); ++c) {
        Element* row = dst + target(c) * rows;
        for (std::int64_t r = r0; r < std::min(r0 + kTile, rows); ++r) row[r] = src[r * cols + c];
      }
    }
  }
}

template <class Target>
void transpose(DType dtype, const std::byte* src, std::byte* dst, std::int64_t rows,
               std::int64_t cols, const Target& target) {
  switch (element_bytes(dtype)) {
    case 1:
      return transpose<std::uint8_t>(src, dst, rows, cols, target);
    case 2:
      return transpose<std::uint16_t>(src, dst, rows, cols, target);
    default:
      return transpose<std::uint32_t>(src, dst, rows, cols, target);
  }
}

// Reads one expert; a class only to name its four arguments once.
class MlpReader {
 public:
  MlpReader(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
            MlpBuffers* buffers)
      : tensors_(tensors), slice_(slice), expert_(expert), out_(*buffers) {
    if (MOESAIC_FAULT(checkpoint_skip_tp_offset)) slice_.first = 0;
  }

  Status run() {
    switch (slice_.storage) {
      case ExpertStorage::kPerExpert:
        MOESAIC_RETURN_IF_ERROR(read_separate(0));
        break;
      case ExpertStorage::kStacked:
        MOESAIC_RETURN_IF_ERROR(read_separate(expert_));
        break;
      case ExpertStorage::kFlat:
        MOESAIC_RETURN_IF_ERROR(read_gate_and_up(expert_));
        MOESAIC_RETURN_IF_ERROR(read_transposed_down());
        break;
      case ExpertStorage::kPerExpertUpFirst:
      case ExpertStorage::kFusedNT:
        MOESAIC_RETURN_IF_ERROR(read_fused_nt());
        break;
      case ExpertStorage::kFusedNN:
        MOESAIC_RETURN_IF_ERROR(read_fused_nn());
        break;
      case ExpertStorage::kMxfp4Interleaved:
        MOESAIC_RETURN_IF_ERROR(read_mxfp4(*tensors_.of(TensorKind::kWeight)[kGateIndex],
                                           *tensors_.of(TensorKind::kWeight)[kDownIndex],
                                           kMxfp4GroupSize / 2, out_.w13, out_.w2));
        MOESAIC_RETURN_IF_ERROR(read_mxfp4(*tensors_.of(TensorKind::kScale)[kGateIndex],
                                           *tensors_.of(TensorKind::kScale)[kDownIndex], 1,
                                           out_.w13_scale, out_.w2_scale));
        break;
      case ExpertStorage::kFusedNNInterleaved:
        MOESAIC_RETURN_IF_ERROR(read_fused_nn_interleaved());
        break;
      case ExpertStorage::kFusedNTInterleaved:
        MOESAIC_RETURN_IF_ERROR(read_fused_nt_interleaved());
        break;
    }
    if (slice_.has_bias) MOESAIC_RETURN_IF_ERROR(read_biases());
    return slice_.format == StoredFormat::kFp8Block ? read_scales() : Status();
  }

  Status read_biases() {
    if (is_interleaved(slice_.storage)) {
      MOESAIC_RETURN_IF_ERROR(read_interleaved_bias());
    } else {
      MOESAIC_RETURN_IF_ERROR(is_fused(slice_.storage) ? read_fused_bias() : read_stacked_bias());
    }
    if (slice_.with_down_bias || MOESAIC_FAULT(checkpoint_down_bias_on_every_rank)) {
      return read_rectangle_widened(*tensors_.of(TensorKind::kBias)[kDownIndex],
                                    {expert_, 1, 0, slice_.hidden}, &out_.small,
                                    out_.w2_bias.as<float>());
    }
    std::memset(out_.w2_bias.data(), 0, static_cast<std::size_t>(out_.w2_bias.bytes()));
    return {};
  }

 private:
  // Rows of gate (half 0) and up (half 1) in w13.
  std::byte* half(int which) {
    if (!slice_.gated) which = 0;
    if (MOESAIC_FAULT(checkpoint_swap_gate_up) && slice_.gated) which = 1 - which;
    return out_.w13.data() + which * slice_.count * slice_.hidden * element_bytes(slice_.dtype);
  }

  Status read_part(const ShardSet::Located& from, const Rectangle& r, std::byte* dst) const {
    return read_weights(from, r, slice_.dtype, dst);
  }

  // Gate and up as matrices of their own; the expert is the `e`-th of what a tensor stacks.
  Status read_gate_and_up(std::int64_t e) {
    const Rectangle rows{e * slice_.width + slice_.first, slice_.count, 0, slice_.hidden};
    if (slice_.gated)
      MOESAIC_RETURN_IF_ERROR(
          read_part(*tensors_.of(TensorKind::kWeight)[kGateIndex], rows, half(0)));
    return read_part(*tensors_.of(TensorKind::kWeight)[kUpIndex], rows, half(1));
  }

  Status read_separate(std::int64_t e) {
    MOESAIC_RETURN_IF_ERROR(read_gate_and_up(e));
    return read_part(*tensors_.of(TensorKind::kWeight)[kDownIndex],
                     {e * slice_.hidden, slice_.hidden, slice_.first, slice_.count},
                     out_.w2.data());
  }

  Status read_fused_nt() {
    const std::int64_t expert = experts_before();
    std::int64_t gate = expert * 2 * slice_.width + slice_.first;
    std::int64_t up = gate + slice_.width;
    if (up_first()) std::swap(gate, up);
    const ShardSet::Located& gate_up = *tensors_.of(TensorKind::kWeight)[kGateIndex];
    MOESAIC_RETURN_IF_ERROR(read_part(gate_up, {gate, slice_.count, 0, slice_.hidden}, half(0)));
    MOESAIC_RETURN_IF_ERROR(read_part(gate_up, {up, slice_.count, 0, slice_.hidden}, half(1)));
    return read_part(*tensors_.of(TensorKind::kWeight)[kDownIndex],
                     {expert * slice_.hidden, slice_.hidden, slice_.first, slice_.count},
                     out_.w2.data());
  }

  // Column (or row) 2j of gate_up is gate j, 2j + 1 is up j.
  std::int64_t deinterleaved(std::int64_t column) const {
    if (MOESAIC_FAULT(checkpoint_skip_deinterleave)) return column;
    return column / 2 + (column % 2) * slice_.count;
  }

  Status read_fused_nn_interleaved() {
    std::byte* raw = out_.raw.data();
    MOESAIC_RETURN_IF_ERROR(read_part(
        *tensors_.of(TensorKind::kWeight)[kGateIndex],
        {expert_ * slice_.hidden, slice_.hidden, 2 * slice_.first, 2 * slice_.count}, raw));
    transpose(slice_.dtype, raw, out_.w13.data(), slice_.hidden, 2 * slice_.count,
              [this](std::int64_t c) { return deinterleaved(c); });
    return read_transposed_down();
  }

  // gate_up [E, 2I, H]: row 2j is gate j, row 2j + 1 is up j.
  Status read_fused_nt_interleaved() {
    std::byte* raw = out_.raw.data();
    MOESAIC_RETURN_IF_ERROR(read_rectangle(
        *tensors_.of(TensorKind::kWeight)[kGateIndex],
        {2 * (expert_ * slice_.width + slice_.first), 2 * slice_.count, 0, slice_.hidden}, raw));
    const std::int64_t row_bytes = slice_.hidden * element_bytes(slice_.dtype);
    for (std::int64_t r = 0; r < 2 * slice_.count; ++r) {
      std::memcpy(out_.w13.data() + deinterleaved(r) * row_bytes, raw + r * row_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
    return read_rectangle(*tensors_.of(TensorKind::kWeight)[kDownIndex],
                          {expert_ * slice_.hidden, slice_.hidden, slice_.first, slice_.count},
                          out_.w2.data());
  }

  // gate_up [E, H, 2I]: columns 0..I-1 are gate, I..2I-1 are up.
  Status read_fused_nn() {
    std::byte* raw = out_.raw.data();
    for (int which = 0; which < 2; ++which) {
      MOESAIC_RETURN_IF_ERROR(read_part(*tensors_.of(TensorKind::kWeight)[kGateIndex],
                                        {expert_ * slice_.hidden, slice_.hidden,
                                         which * slice_.width + slice_.first, slice_.count},
                                        raw));
      transpose(slice_.dtype, raw, half(which), slice_.hidden, slice_.count,
                [](std::int64_t c) { return c; });
    }
    return read_transposed_down();
  }

  // down [.., I, H] -> w2 [H, I].
  Status read_transposed_down() {
    std::byte* raw = out_.raw.data();
    MOESAIC_RETURN_IF_ERROR(
        read_part(*tensors_.of(TensorKind::kWeight)[kDownIndex],
                  {expert_ * slice_.width + slice_.first, slice_.count, 0, slice_.hidden}, raw));
    if (MOESAIC_FAULT(checkpoint_skip_transpose)) {
      std::memcpy(out_.w2.data(), raw, static_cast<std::size_t>(out_.w2.bytes()));
      return {};
    }
    transpose(slice_.dtype, raw, out_.w2.data(), slice_.count, slice_.hidden,
              [](std::int64_t c) { return c; });
    return {};
  }

  // Blocks (16 bytes per group) or scales (1 byte) of one expert: rows of gate_up lie gate, up,
  // gate, up; the slice of down is a range of groups of every row.
  Status read_mxfp4(const ShardSet::Located& gate_up, const ShardSet::Located& down,
                    std::int64_t group_bytes, Tensor& w13, Tensor& w2) {
    const std::int64_t row_groups = slice_.hidden / kMxfp4GroupSize;
    // The file's matrix has rows of one group (blocks) or of all groups of a row (scales).
    const bool blocks = group_bytes > 1;
    const std::int64_t first = 2 * (expert_ * slice_.width + slice_.first);
    const Rectangle rows =
        blocks ? Rectangle{first * row_groups, 2 * slice_.count * row_groups, 0, group_bytes}
               : Rectangle{first, 2 * slice_.count, 0, row_groups};
    std::byte* raw = out_.raw.data();
    MOESAIC_RETURN_IF_ERROR(read_rectangle(gate_up, rows, raw));
    const std::int64_t row_bytes = row_groups * group_bytes;
    for (std::int64_t r = 0; r < 2 * slice_.count; ++r) {
      const bool keep = !blocks && MOESAIC_FAULT(checkpoint_mxfp4_scales_in_file_order);
      std::memcpy(w13.data() + (keep ? r : deinterleaved(r)) * row_bytes, raw + r * row_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
    const std::int64_t all = slice_.width / kMxfp4GroupSize;
    const std::int64_t mine = slice_.count / kMxfp4GroupSize;
    const std::int64_t skip = slice_.first / kMxfp4GroupSize;
    const std::int64_t down_row = expert_ * slice_.hidden;
    if (!blocks) {
      return read_rectangle(down, {down_row, slice_.hidden, skip, mine}, w2.data());
    }
    for (std::int64_t h = 0; h < slice_.hidden; ++h) {
      MOESAIC_RETURN_IF_ERROR(read_rectangle(down,
                                             {(down_row + h) * all + skip, mine, 0, group_bytes},
                                             w2.data() + h * mine * group_bytes));
    }
    return {};
  }

  // One row per expert: gate [E, I], up [E, I].
  Status read_stacked_bias() {
    float* dst = out_.w13_bias.as<float>();
    for (const std::size_t projection : {kGateIndex, kUpIndex}) {
      if (!tensors_.of(TensorKind::kBias)[projection]) continue;
      MOESAIC_RETURN_IF_ERROR(read_rectangle_widened(*tensors_.of(TensorKind::kBias)[projection],
                                                     {expert_, 1, slice_.first, slice_.count},
                                                     &out_.small, dst));
      dst += slice_.count;
    }
    return {};
  }

  // gate_up [E, 2I]: gate, then up.
  Status read_fused_bias() {
    for (int which = 0; which < 2; ++which) {
      const int half = MOESAIC_FAULT(checkpoint_fused_bias_swapped) ? 1 - which : which;
      MOESAIC_RETURN_IF_ERROR(
          read_rectangle_widened(*tensors_.of(TensorKind::kBias)[kGateIndex],
                                 {expert_, 1, half * slice_.width + slice_.first, slice_.count},
                                 &out_.small, out_.w13_bias.as<float>() + which * slice_.count));
    }
    return {};
  }

  // gate_up [E, 2I], interleaved as its weight is.
  Status read_interleaved_bias() {
    std::vector<float> row(static_cast<std::size_t>(2 * slice_.count));
    MOESAIC_RETURN_IF_ERROR(read_rectangle_widened(*tensors_.of(TensorKind::kBias)[kGateIndex],
                                                   {expert_, 1, 2 * slice_.first, 2 * slice_.count},
                                                   &out_.small, row.data()));
    for (std::int64_t c = 0; c < 2 * slice_.count; ++c) {
      out_.w13_bias.as<float>()[deinterleaved(c)] = row[static_cast<std::size_t>(c)];
    }
    return {};
  }

  // Experts before this one in the tensors that hold all of them.
  std::int64_t experts_before() const { return is_per_expert(slice_.storage) ? 0 : expert_; }

  std::int64_t stacked_scale_of() const {
    return MOESAIC_FAULT(checkpoint_stacked_scale_of_first) ? 0 : expert_;
  }

  bool up_first() const {
    return slice_.storage == ExpertStorage::kPerExpertUpFirst &&
           !MOESAIC_FAULT(checkpoint_up_first_ignored);
  }

  Status read_scales() {
    const std::int64_t h_blocks = scale_blocks(slice_.hidden);
    const std::int64_t blocks = slice_.count / kFp8BlockSize;
    const std::int64_t all = slice_.width / kFp8BlockSize;
    const std::int64_t first =
        MOESAIC_FAULT(checkpoint_scale_slice_in_rows) ? 0 : slice_.first / kFp8BlockSize;
    const bool fused = is_fused(slice_.storage) || slice_.scales_stacked;
    const std::int64_t before = slice_.scales_stacked ? stacked_scale_of() : experts_before();
    std::int64_t gate_row = before * (fused ? 2 : 1) * all + first;
    std::int64_t up_row = fused ? gate_row + all : gate_row;
    if (up_first()) std::swap(gate_row, up_row);
    const ShardSet::Located& up = fused ? *tensors_.of(TensorKind::kScale)[kGateIndex]
                                        : *tensors_.of(TensorKind::kScale)[kUpIndex];
    auto* w13_scale = out_.w13_scale.as<float>();
    if (slice_.gated) {
      MOESAIC_RETURN_IF_ERROR(read_scale_grid(*tensors_.of(TensorKind::kScale)[kGateIndex],
                                              {gate_row, blocks, 0, h_blocks}, h_blocks,
                                              &out_.small, w13_scale));
      w13_scale += blocks * h_blocks;
    }
    MOESAIC_RETURN_IF_ERROR(
        read_scale_grid(up, {up_row, blocks, 0, h_blocks}, h_blocks, &out_.small, w13_scale));
    MOESAIC_RETURN_IF_ERROR(read_scale_grid(*tensors_.of(TensorKind::kScale)[kDownIndex],
                                            {before * h_blocks, h_blocks, first, blocks}, all,
                                            &out_.small, out_.w2_scale.as<float>()));
    return check_fp8(h_blocks, blocks);
  }

  Status check_fp8(std::int64_t h_blocks, std::int64_t blocks) const {
    const bool fused = is_fused(slice_.storage);
    const auto check = [&](std::size_t projection, const Tensor& weights, const Tensor& scales,
                           std::int64_t part, std::int64_t rows, std::int64_t cols,
                           std::int64_t first_row, std::int64_t first_col) {
      return check_fp8_block({tensors_.of(TensorKind::kWeight)[projection]->info->name,
                              tensors_.of(TensorKind::kScale)[projection]->info->name,
                              weights.as<std::uint8_t>() + part * slice_.count * slice_.hidden,
                              scales.as<float>() + part * blocks * h_blocks, rows, cols, first_row,
                              first_col});
    };
    std::int64_t gate = experts_before() * (fused ? 2 : 1) * slice_.width + slice_.first;
    std::int64_t up = fused ? gate + slice_.width : gate;
    if (up_first()) std::swap(gate, up);
    if (slice_.gated) {
      MOESAIC_RETURN_IF_ERROR(
          check(kGateIndex, out_.w13, out_.w13_scale, 0, slice_.count, slice_.hidden, gate, 0));
    }
    MOESAIC_RETURN_IF_ERROR(check(fused ? kGateIndex : kUpIndex, out_.w13, out_.w13_scale,
                                  slice_.gated ? 1 : 0, slice_.count, slice_.hidden, up, 0));
    return check(kDownIndex, out_.w2, out_.w2_scale, 0, slice_.hidden, slice_.count,
                 experts_before() * slice_.hidden, slice_.first);
  }

  const MlpTensors& tensors_;
  MlpSlice slice_;
  std::int64_t expert_;
  MlpBuffers& out_;
};

Shape with_leading(const MlpSlice& slice, std::int64_t rows, std::int64_t cols) {
  return slice.leading > 0 ? Shape{slice.leading, rows, cols} : Shape{rows, cols};
}

}  // namespace

Status check_slice(std::string_view field, std::int64_t width, std::int64_t parts,
                   std::int64_t unit) {
  if (width % parts != 0) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format("{}: got {} with tp_size {}, need a multiple of tp_size", field, width, parts)};
  }
  if ((width / parts) % unit == 0) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: got {} of {} on a rank with tp_size {}, need a multiple of the weight "
                      "block {}",
                      field, width / parts, width, parts, unit)};
}

Result<MlpBuffers> MlpBuffers::make(const MlpSlice& s) {
  MlpBuffers b;
  MOESAIC_ASSIGN_OR_RETURN(
      b.w13, Tensor::uninitialized(s.dtype, with_leading(s, s.halves() * s.count, s.hidden)));
  MOESAIC_ASSIGN_OR_RETURN(b.w2,
                           Tensor::uninitialized(s.dtype, with_leading(s, s.hidden, s.count)));
  std::int64_t small_elements = 0;
  if (s.format == StoredFormat::kFp8Block) {
    const std::int64_t blocks = s.count / kFp8BlockSize;
    const std::int64_t h_blocks = scale_blocks(s.hidden);
    MOESAIC_ASSIGN_OR_RETURN(
        b.w13_scale,
        Tensor::uninitialized(DType::kF32, with_leading(s, s.halves() * blocks, h_blocks)));
    MOESAIC_ASSIGN_OR_RETURN(b.w2_scale,
                             Tensor::uninitialized(DType::kF32, with_leading(s, h_blocks, blocks)));
    small_elements = blocks * h_blocks;
  }
  if (s.format == StoredFormat::kMxfp4) {
    const std::int64_t groups = s.hidden / kMxfp4GroupSize;
    MOESAIC_ASSIGN_OR_RETURN(b.w13_scale,
                             Tensor::uninitialized(DType::kF8E8M0, {2 * s.count, groups}));
    MOESAIC_ASSIGN_OR_RETURN(
        b.w2_scale, Tensor::uninitialized(DType::kF8E8M0, {s.hidden, s.count / kMxfp4GroupSize}));
    MOESAIC_ASSIGN_OR_RETURN(b.raw, Tensor::uninitialized(DType::kU8, {2 * s.count, s.hidden / 2}));
  }
  if (s.has_bias) {
    MOESAIC_RETURN_IF_ERROR(b.make_biases(s));
    small_elements = std::max(2 * s.count, s.hidden);
  }
  MOESAIC_ASSIGN_OR_RETURN(b.small, Tensor::uninitialized(DType::kF32, {small_elements}));
  if (is_staged(s.storage)) {
    MOESAIC_ASSIGN_OR_RETURN(b.raw, Tensor::uninitialized(s.dtype, {2 * s.count, s.hidden}));
  }
  return b;
}

Status MlpBuffers::make_biases(const MlpSlice& s) {
  MOESAIC_ASSIGN_OR_RETURN(w13_bias, Tensor::uninitialized(DType::kF32, {s.halves() * s.count}));
  MOESAIC_ASSIGN_OR_RETURN(w2_bias, Tensor::uninitialized(DType::kF32, {s.hidden}));
  MOESAIC_ASSIGN_OR_RETURN(small,
                           Tensor::uninitialized(DType::kF32, {std::max(2 * s.count, s.hidden)}));
  return {};
}

Status read_mlp_biases(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
                       MlpBuffers* buffers) {
  return MlpReader(tensors, slice, expert, buffers).read_biases();
}

Status read_mlp(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
                MlpBuffers* buffers) {
  return MlpReader(tensors, slice, expert, buffers).run();
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

}  // namespace moesaic
