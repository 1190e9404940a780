#include "checkpoint/reader/mlp_buffers.h"

#include <cstring>

#include "core/checked.h"
#include "core/fault.h"
#include "quant/compute_scheme.h"

namespace moesaic::checkpoint {
namespace {

// E8M0 of 1.
constexpr int kExponentOfOne = 127;

void fill_bytes(Tensor* t, int value) {
  if (t->present()) std::memset(t->data(), value, static_cast<std::size_t>(t->bytes()));
}

// Rows [first, first + rows) of `from` to rows `at` and on of `to`, whose rows may be longer.
void copy_rows(const Tensor& from, std::int64_t first, std::int64_t rows, Tensor* to,
               std::int64_t at) {
  if (!from.present() || rows == 0) return;
  const std::int64_t bytes = from.bytes() / from.shape()[0];
  const std::int64_t pitch = to->bytes() / to->shape()[0];
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(to->data() + (at + r) * pitch, from.data() + (first + r) * bytes,
                static_cast<std::size_t>(bytes));
  }
}

}  // namespace

Result<MatrixBuffers> MatrixBuffers::make(const Scheme& scheme, std::int64_t parts,
                                          std::int64_t part_rows, std::int64_t columns) {
  const std::int64_t rows = parts * part_rows;
  const OperandQuant& w = scheme.weight;
  MatrixBuffers m;
  const auto allocate = [](Tensor* t, DType dtype, const Shape& shape) -> Status {
    MOESAIC_ASSIGN_OR_RETURN(*t, Tensor::uninitialized(dtype, shape));
    return {};
  };
  MOESAIC_RETURN_IF_ERROR(allocate(&m.weight, w.dtype, {rows, columns}));
  if (w.granularity == ScaleGranularity::kNone) return m;
  Shape shape = {1};
  if (w.granularity == ScaleGranularity::kBlock) {
    shape = {parts * ceil_div(part_rows, w.block_n), ceil_div(columns, w.block_k)};
  }
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
  if (quant::has_static_scale(scheme.activation)) {
    MOESAIC_RETURN_IF_ERROR(allocate(&m.input_scale, DType::kF32, {1}));
  }
  return m;
}

std::int64_t MatrixBuffers::bytes() const {
  return weight.bytes() + scale.bytes() + zero.bytes() + min.bytes() + global_scale.bytes() +
         channel_scale.bytes() + input_scale.bytes() + perm.bytes();
}

Result<MlpBuffers> MlpBuffers::make(const MlpSlice& s) {
  const std::int64_t parts = s.gated ? 2 : 1, rows = parts * s.count;
  MlpBuffers b;
  MOESAIC_ASSIGN_OR_RETURN(b.w13, MatrixBuffers::make(s.scheme, parts, s.count, s.hidden));
  MOESAIC_ASSIGN_OR_RETURN(b.w2, MatrixBuffers::make(s.scheme, 1, s.hidden, s.count));
  if (!s.has_bias) return b;
  MOESAIC_ASSIGN_OR_RETURN(b.w13_bias, Tensor::uninitialized(DType::kF32, {rows}));
  MOESAIC_ASSIGN_OR_RETURN(b.w2_bias, Tensor::uninitialized(DType::kF32, {s.hidden}));
  return b;
}

void pad_mlp(const MlpBuffers& from, const MlpSlice& slice, MlpBuffers* to) {
  const int zero = MOESAIC_FAULT(checkpoint_padding_is_not_zero) ? 0x22 : 0;
  for (Tensor* codes : {&to->w13.weight, &to->w2.weight}) fill_bytes(codes, zero);
  for (Tensor* scale : {&to->w13.scale, &to->w2.scale}) fill_bytes(scale, kExponentOfOne);
  for (Tensor* bias : {&to->w13_bias, &to->w2_bias}) fill_bytes(bias, 0);
  if (slice.count == 0) return;
  for (int half = 0; half < (slice.gated ? 2 : 1); ++half) {
    const std::int64_t first = half * slice.count, at = half * slice.padded;
    copy_rows(from.w13.weight, first, slice.count, &to->w13.weight, at);
    copy_rows(from.w13.scale, first, slice.count, &to->w13.scale, at);
    copy_rows(from.w13_bias, first, slice.count, &to->w13_bias, at);
  }
  copy_rows(from.w2.weight, 0, slice.hidden, &to->w2.weight, 0);
  copy_rows(from.w2.scale, 0, slice.hidden, &to->w2.scale, 0);
  copy_rows(from.w2_bias, 0, slice.hidden, &to->w2_bias, 0);
}

ExpertWeightsView view_of(const MlpBuffers& b) {
  const auto view = [](const Tensor& t) { return t.present() ? t.view() : ConstTensorView(); };
  ExpertWeightsView v;
  v.w13 = view(b.w13.weight);
  v.w2 = view(b.w2.weight);
  v.w13_scale = view(b.w13.scale);
  v.w2_scale = view(b.w2.scale);
  v.w13_bias = view(b.w13_bias);
  v.w2_bias = view(b.w2_bias);
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

}  // namespace moesaic::checkpoint
