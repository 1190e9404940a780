#include "layer/load_sources.h"

#include <fmt/format.h>

#include <cmath>
#include <new>
#include <utility>

#include "core/fault.h"
#include "numerics/element.h"
#include "quant/fp8_block.h"

namespace moesaic {
namespace {

class PassingSource final : public ExpertSource {
 public:
  explicit PassingSource(ExpertSource& source) : source_(source) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override { return source_.expert(e); }

 private:
  ExpertSource& source_;
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
  if (w.dtype != DType::kF32 && w.dtype != DType::kBF16 && w.dtype != DType::kF16) {
    return {StatusCode::kInvalidDType,
            fmt::format("{}: got {}, need F32, BF16 or F16", field, dtype_name(w.dtype))};
  }
  return expect_contiguous(field, w);
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
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = load_as_f32(w.data, w.dtype, i);
      store_from_f32(out.data(), dtype_, i, value);
      if (std::isfinite(value) && !std::isfinite(load_as_f32(out.data(), dtype_, i))) {
        return {StatusCode::kUnsupported,
                fmt::format("{}: got {} at [{}, {}], which {} cannot hold; nearest is --quant f32",
                            field, value, i / w.dim(1), i % w.dim(1), dtype_name(dtype_))};
      }
    }
    return {};
  }

  ExpertSource& source_;
  DType dtype_;
  Tensor w13_, w2_;
};

class QuantizingSource final : public ExpertSource {
 public:
  explicit QuantizingSource(ExpertSource& source) : source_(source) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    MOESAIC_ASSIGN_OR_RETURN(ExpertWeightsView v, source_.expert(e));
    const std::string context = fmt::format("expert {}", e);
    Status status = quantise("w13", v.w13, w13_, w13_scale_);
    if (status.ok()) status = quantise("w2", v.w2, w2_, w2_scale_);
    if (!status.ok()) return status.with_context(context);
    v.w13 = w13_.view();
    v.w13_scale = w13_scale_.view();
    v.w2 = w2_.view();
    v.w2_scale = w2_scale_.view();
    return v;
  }

 private:
  static Status quantise(std::string_view field, const ConstTensorView& w, Tensor& codes,
                         Tensor& scales) {
    MOESAIC_RETURN_IF_ERROR(check_matrix(field, w));
    const BlockShape block;
    MOESAIC_ASSIGN_OR_RETURN(const Shape scale_shape, block_scale_shape(w.shape, block));
    MOESAIC_RETURN_IF_ERROR(reuse(codes, DType::kF8E4M3, w.shape));
    MOESAIC_RETURN_IF_ERROR(reuse(scales, DType::kF32, scale_shape));
    const Status status =
        quantize_fp8_block(w, block, ScaleRounding::kNone, codes.view(), scales.view());
    if (MOESAIC_FAULT(layer_quantise_scale_of_first_block)) {
      for (std::int64_t i = 0; i < scales.bytes() / 4; ++i) {
        scales.as<float>()[i] = scales.as<float>()[0];
      }
    }
    return status.ok() ? status : status.with_context(field);
  }

  ExpertSource& source_;
  Tensor w13_, w13_scale_, w2_, w2_scale_;
};

}  // namespace

Result<std::unique_ptr<ExpertSource>> make_converting_source(ExpertSource& source,
                                                             const QuantPlan& plan) {
  std::unique_ptr<ExpertSource> result;
  switch (plan.conversion) {
    case LoadConversion::kNone:
      result.reset(new (std::nothrow) PassingSource(source));
      break;
    case LoadConversion::kRound:
      result.reset(new (std::nothrow) RoundingSource(source, plan.scheme.weight.dtype));
      break;
    case LoadConversion::kQuantizeFp8Block:
      result.reset(new (std::nothrow) QuantizingSource(source));
      break;
  }
  if (!result) return Status(StatusCode::kOutOfMemory, "cannot allocate an expert source");
  return result;
}

}  // namespace moesaic
