#include "layer/load_sources.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#include "core/fault.h"
#include "core/refusal.h"
#include "numerics/element.h"
#include "quant/compute_scheme.h"
#include "quant/quantize_weight.h"

namespace moesaic::layer {
namespace {

class PassingSource final : public ExpertSource {
 public:
  PassingSource(ExpertSource& source, const Scheme& scheme)
      : source_(source), input_scales_(quant::has_static_scale(scheme.activation)) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    MOESAIC_ASSIGN_OR_RETURN(ExpertWeightsView v, source_.expert(e));
    if (!input_scales_) v.w13_input_scale = v.w2_input_scale = ConstTensorView();
    return v;
  }

 private:
  ExpertSource& source_;
  bool input_scales_;
};

// Keeps `buffer` unless its dtype and shape must change.
Status reuse(Tensor& buffer, DType dtype, const Shape& shape) {
  if (buffer.present() && buffer.dtype() == dtype && buffer.shape() == shape) return {};
  MOESAIC_ASSIGN_OR_RETURN(buffer, Tensor::uninitialized(dtype, shape));
  return {};
}

Status check_matrix(std::string_view field, const ConstTensorView& w) {
  if (w.rank() != 2) {
    return {StatusCode::kInvalidShape,
            fmt::format("{}: got {}, need [rows, columns]", field, w.shape.to_string())};
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, w.dtype));
  return expect_contiguous(field, w);
}

constexpr double kSmallestNormalF16 = 0x1p-14;
// Of the error of normal data: what weights below the smallest normal number may lose of a matrix.
constexpr double kMostSmallError = 1.15;

OperandQuant weight_of(DType dtype) {
  OperandQuant plain;
  plain.dtype = dtype;
  return plain;
}

class RoundingSource final : public ExpertSource {
 public:
  RoundingSource(ExpertSource& source, DType dtype) : source_(source), dtype_(dtype) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    MOESAIC_ASSIGN_OR_RETURN(ExpertWeightsView v, source_.expert(e));
    const std::string context = fmt::format("expert {}", e);
    Status status = round("w13", v.w13, w13_);
    if (status.ok()) status = round("w2", v.w2, w2_);
    if (!status.ok()) return status.with_context(context);
    v.w13 = w13_.view();
    v.w2 = w2_.view();
    return v;
  }

 private:
  Status round(std::string_view field, const ConstTensorView& w, Tensor& out) const {
    MOESAIC_RETURN_IF_ERROR(check_matrix(field, w));
    MOESAIC_RETURN_IF_ERROR(reuse(out, dtype_, w.shape));
    const std::int64_t count = w.dim(0) * w.dim(1);
    double small_errors = 0, squares = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = load_as_f32(w.data, w.dtype, i);
      store_from_f32(out.data(), dtype_, i, value);
      if (std::isfinite(value) && !std::isfinite(load_as_f32(out.data(), dtype_, i))) {
        return {StatusCode::kUnsupported,
                fmt::format("{}: got {} at [{}, {}], which {} cannot hold; nearest is --quant f32",
                            field, value, i / w.dim(1), i % w.dim(1), dtype_name(dtype_))};
      }
      if (dtype_ != DType::kF16) continue;  // the others have the range of fp32
      const double exact = value;
      squares += exact * exact;
      if (std::abs(exact) >= kSmallestNormalF16) continue;
      const double error = static_cast<double>(load_as_f32(out.data(), dtype_, i)) - exact;
      small_errors += error * error;
    }
    const double bound = kMostSmallError * quant::rounding_error(weight_of(dtype_));
    if (!(small_errors > bound * bound * squares)) return {};
    return {
        StatusCode::kUnsupported,
        fmt::format("{}: got weights below 6.1e-5 that {} rounds with a relative error of {:.1e}, "
                    "need at most {:.1e}; nearest is --quant f32",
                    field, dtype_name(dtype_), std::sqrt(small_errors / squares), bound)};
  }

  ExpertSource& source_;
  DType dtype_;
  Tensor w13_, w2_;
};

// Static input scales without calibration data (schemes whose activations have an outer factor per
// expert, NVFP4). The scales of groups are e4m3: exact enough from 2^-6 to 448. A typical group's
// is put at about 1, which leaves room for groups 64 times smaller and 448 times larger. Powers of
// two, so that the factor itself rounds nothing.
//
// Hidden states come out of a normalisation: groups of 16 have a largest value of about 2 = 6 / 4.
constexpr float kHiddenInputScale = 0.25F;

// Root of the mean square of a row of w, over all rows: what the projection makes of rows of unit
// variance.
double row_norm(const Tensor& w, std::int64_t first_row, std::int64_t rows) {
  const std::int64_t cols = w.shape()[1];
  const float* values = w.as<float>() + first_row * cols;
  double sum = 0;
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  return std::sqrt(sum / static_cast<double>(rows));
}

// The intermediate is about gate times up (or up squared), and a group's largest value about twice
// its root mean square.
float intermediate_input_scale(const Tensor& w13, std::int64_t intermediate) {
  const double first = row_norm(w13, 0, intermediate);
  const bool gated = w13.shape()[0] > intermediate;
  const double typical = 2 * first * (gated ? row_norm(w13, intermediate, intermediate) : first);
  if (!(typical > 0)) return kHiddenInputScale;
  // Far inside fp32, so that no product with it leaves the format.
  const double exponent = std::clamp(std::round(std::log2(typical / 6)), -60.0, 60.0);
  return static_cast<float>(std::exp2(exponent));
}

class QuantizingSource final : public ExpertSource {
 public:
  QuantizingSource(ExpertSource& source, const Scheme& scheme) : source_(source), scheme_(scheme) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    MOESAIC_ASSIGN_OR_RETURN(ExpertWeightsView v, source_.expert(e));
    const std::string context = fmt::format("expert {}", e);
    // Block scales start anew at the up half.
    const std::int64_t intermediate = v.w2.rank() == 2 ? v.w2.dim(1) : 0;
    Status status = quantise("w13", v.w13, intermediate, &w13_);
    if (status.ok() && scheme_.activation.outer_scale == OuterScale::kTensor) {
      status = set_input_scales(intermediate);
    }
    if (status.ok()) status = quantise("w2", v.w2, v.w2.rank() == 2 ? v.w2.dim(0) : 0, &w2_);
    if (!status.ok()) return status.with_context(context);
    const quant::StoredMatrix a = w13_.view(), b = w2_.view();
    v.w13 = a.weight;
    v.w13_scale = a.scale;
    v.w13_global_scale = a.global_scale;
    v.w13_channel_scale = a.channel_scale;
    v.w13_zero = a.zero;
    v.w2 = b.weight;
    v.w2_scale = b.scale;
    v.w2_global_scale = b.global_scale;
    v.w2_channel_scale = b.channel_scale;
    v.w2_zero = b.zero;
    if (w13_input_scale_.present()) {
      v.w13_input_scale = w13_input_scale_.view();
      v.w2_input_scale = w2_input_scale_.view();
    }
    return v;
  }

 private:
  Status quantise(std::string_view field, const ConstTensorView& w, std::int64_t rows_per_part,
                  quant::QuantizedMatrix* to) {
    MOESAIC_RETURN_IF_ERROR(check_matrix(field, w));
    MOESAIC_RETURN_IF_ERROR(reuse(wide_, DType::kF32, w.shape));
    for (std::int64_t i = 0; i < w.dim(0) * w.dim(1); ++i) {
      wide_.as<float>()[i] = load_as_f32(w.data, w.dtype, i);
    }
    Result<quant::QuantizedMatrix> made =
        quant::quantize_weight(scheme_.weight, wide_.view(), rows_per_part);
    if (!made.ok()) return made.status().with_context(field);
    *to = std::move(made).value();
    if (MOESAIC_FAULT(layer_quantise_scale_of_first_block)) {
      const std::int64_t size = dtype_bits(to->scale.dtype()) / 8;
      for (std::int64_t i = size; i < to->scale.bytes(); ++i) {
        to->scale.data()[i] = to->scale.data()[i % size];
      }
    }
    return {};
  }

  // wide_ holds w13.
  Status set_input_scales(std::int64_t intermediate) {
    MOESAIC_RETURN_IF_ERROR(reuse(w13_input_scale_, DType::kF32, {1}));
    MOESAIC_RETURN_IF_ERROR(reuse(w2_input_scale_, DType::kF32, {1}));
    *w13_input_scale_.as<float>() = kHiddenInputScale;
    *w2_input_scale_.as<float>() = MOESAIC_FAULT(layer_input_scale_of_wide_range)
                                       ? 0x1p20F
                                       : intermediate_input_scale(wide_, intermediate);
    return {};
  }

  ExpertSource& source_;
  Scheme scheme_;
  Tensor wide_;  // one matrix
  quant::QuantizedMatrix w13_, w2_;
  Tensor w13_input_scale_, w2_input_scale_;
};

}  // namespace

Result<std::unique_ptr<ExpertSource>> make_converting_source(ExpertSource& source,
                                                             const QuantPlan& plan) {
  std::unique_ptr<ExpertSource> result;
  switch (plan.conversion) {
    case LoadConversion::kNone:
      result.reset(new (std::nothrow) PassingSource(source, plan.scheme));
      break;
    case LoadConversion::kRound:
      result.reset(new (std::nothrow) RoundingSource(source, plan.scheme.weight.dtype));
      break;
    case LoadConversion::kQuantize:
      result.reset(new (std::nothrow) QuantizingSource(source, plan.scheme));
      break;
  }
  if (!result) return Status(StatusCode::kOutOfMemory, "cannot allocate an expert source");
  return result;
}

}  // namespace moesaic::layer
