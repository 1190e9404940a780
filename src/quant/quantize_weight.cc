#include "quant/quantize_weight.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

#include "core/checked.h"
#include "numerics/element.h"
#include "quant/arguments.h"
#include "quant/bnb.h"
#include "quant/fp8_block.h"
#include "quant/fp8_scaled.h"
#include "quant/int4_fp8.h"
#include "quant/int_group.h"
#include "quant/int_packing.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::quant {
namespace {

Status unsupported(const OperandQuant& quant) {
  return {StatusCode::kUnsupported,
          fmt::format("quant.weight: got {} with block {}x{}, need a format of the catalogue of "
                      "schemes",
                      dtype_name(quant.dtype), quant.block_n, quant.block_k)};
}

// Allocates what a step fills.
class Builder {
 public:
  Builder(const OperandQuant& quant, ConstTensorView w) : quant_(quant), w_(w) {}

  Status run(std::int64_t rows_per_part);
  QuantizedMatrix take() { return std::move(out_); }

 private:
  std::int64_t rows() const { return w_.dim(0); }
  std::int64_t cols() const { return w_.dim(1); }
  bool per(ScaleGranularity g) const { return quant_.granularity == g; }
  Status make(Tensor* t, DType dtype, const Shape& shape) const {
    MOESAIC_ASSIGN_OR_RETURN(*t, Tensor::zeros(dtype, shape));
    return {};
  }
  // [N, ceil(K/block_k)]
  Result<Shape> grid() const {
    MOESAIC_RETURN_IF_ERROR(expect_positive("quant.block_k", quant_.block_k));
    return Shape{rows(), ceil_div(cols(), quant_.block_k)};
  }

  // One step per way of quantising; kQuantisers says which a format has.
  Status plain(std::int64_t /*rows_per_part*/) {
    if (!per(ScaleGranularity::kNone)) return unsupported(quant_);
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, quant_.dtype, w_.shape));
    for (std::int64_t i = 0; i < rows() * cols(); ++i) {
      store_from_f32(out_.weight.data(), quant_.dtype, i, w_.as<float>()[i]);
    }
    return {};
  }

  Status fp8(std::int64_t rows_per_part) {
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, DType::kF8E4M3, w_.shape));
    if (per(ScaleGranularity::kTensor)) {
      MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, {1}));
      return quantize_fp8_tensor(w_, out_.weight.view(), out_.scale.view());
    }
    if (per(ScaleGranularity::kChannel)) {
      MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, {rows()}));
      return quantize_fp8_rows(w_, out_.weight.view(), out_.scale.view());
    }
    if (!per(ScaleGranularity::kBlock)) return unsupported(quant_);
    MOESAIC_RETURN_IF_ERROR(expect_positive("rows_per_part", rows_per_part));
    const BlockShape block{quant_.block_n, quant_.block_k};
    MOESAIC_ASSIGN_OR_RETURN(const Shape part_grid,
                             block_scale_shape({rows_per_part, cols()}, block));
    const std::int64_t parts = rows() / rows_per_part;
    MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, {parts * part_grid[0], part_grid[1]}));
    for (std::int64_t p = 0; p < parts; ++p) {
      const std::int64_t at = p * rows_per_part * cols();
      MOESAIC_RETURN_IF_ERROR(quantize_fp8_block(
          {w_.data + 4 * at, DType::kF32, {rows_per_part, cols()}}, block, ScaleRounding::kNone,
          {out_.weight.data() + at, DType::kF8E4M3, {rows_per_part, cols()}},
          {out_.scale.data() + 4 * p * part_grid[0] * part_grid[1], DType::kF32, part_grid}));
    }
    return {};
  }

  Status mx(std::int64_t /*rows_per_part*/) {
    if (quant_.block_k != kMxGroupSize) {
      return unsupported(quant_);
    }
    MOESAIC_ASSIGN_OR_RETURN(const Shape groups, grid());
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, quant_.dtype, w_.shape));
    MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF8E8M0, groups));
    const ExponentRule rule =
        quant_.dtype == DType::kF8E4M3 ? ExponentRule::kCeil : ExponentRule::kRound175;
    return quantize_mx(w_, rule, out_.weight.view(), out_.scale.view());
  }

  Status nvfp4(std::int64_t /*rows_per_part*/) {
    if (quant_.outer_scale != OuterScale::kTensor || quant_.block_k != kNvfp4GroupSize) {
      return unsupported(quant_);
    }
    MOESAIC_ASSIGN_OR_RETURN(const Shape groups, grid());
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, DType::kF4E2M1, w_.shape));
    MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF8E4M3, groups));
    MOESAIC_RETURN_IF_ERROR(make(&out_.global_scale, DType::kF32, {1}));
    const float gscale = nvfp4_quant_multiplier(max_abs(w_, 0, rows() * cols()));
    *out_.global_scale.as<float>() = 1.0F / gscale;
    return quantize_nvfp4(w_, gscale, out_.weight.view(), out_.scale.view());
  }

  Status int8(std::int64_t /*rows_per_part*/) {
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, DType::kI8, w_.shape));
    if (per(ScaleGranularity::kGroup)) {
      MOESAIC_ASSIGN_OR_RETURN(const Shape groups, grid());
      MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, groups));
      return quantize_int_group(w_, {8, quant_.block_k, IntScaleRule::kLargestCode},
                                out_.weight.view(), out_.scale.view());
    }
    if (!per(ScaleGranularity::kChannel)) return unsupported(quant_);
    MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, {rows()}));
    const TensorView column(out_.scale.data(), DType::kF32, {rows(), 1});
    return quantize_int_group(w_, {8, -1, IntScaleRule::kLargestCode}, out_.weight.view(), column);
  }

  // Four-bit codes of one byte each, packed two per byte.
  Status pack(const Tensor& codes) {
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, quant_.dtype, w_.shape));
    return pack_nibbles(codes.view(), 0, out_.weight.view());
  }

  // A group without codes has the scale 1. Beside real scales that would be the row's largest, and
  // leave no bits for them: it gets the largest real one. Rows without codes keep 1.
  void share_scale_with_zero_groups(const Tensor& codes, Tensor* scale) const {
    const std::int64_t groups = scale->shape()[1];
    const auto coded = [&](std::int64_t n, std::int64_t g) {
      const std::int8_t* row = codes.as<std::int8_t>() + n * cols();
      return std::any_of(row + g * quant_.block_k, row + std::min((g + 1) * quant_.block_k, cols()),
                         [](std::int8_t q) { return q != 0; });
    };
    for (std::int64_t n = 0; n < rows(); ++n) {
      float* row = scale->as<float>() + n * groups;
      float largest = 0.0F;
      for (std::int64_t g = 0; g < groups; ++g) {
        if (coded(n, g)) largest = std::max(largest, row[g]);
      }
      if (largest == 0.0F) continue;
      for (std::int64_t g = 0; g < groups; ++g) {
        if (!coded(n, g)) row[g] = largest;
      }
    }
  }

  Status int4(std::int64_t /*rows_per_part*/) {
    MOESAIC_ASSIGN_OR_RETURN(const Shape groups, grid());
    Tensor codes, group_scale;
    MOESAIC_RETURN_IF_ERROR(make(&codes, DType::kI8, w_.shape));
    MOESAIC_RETURN_IF_ERROR(make(&group_scale, DType::kF32, groups));
    MOESAIC_RETURN_IF_ERROR(quantize_int_group(w_, {4, quant_.block_k, IntScaleRule::kFullRange},
                                               codes.view(), group_scale.view()));
    MOESAIC_RETURN_IF_ERROR(pack(codes));
    if (quant_.scale_format == ScaleFormat::kF32) {
      out_.scale = std::move(group_scale);
      return {};
    }
    share_scale_with_zero_groups(codes, &group_scale);
    MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF8E4M3, groups));
    MOESAIC_RETURN_IF_ERROR(make(&out_.channel_scale, DType::kF32, {rows()}));
    return split_int4_fp8_scales(group_scale.view(), out_.scale.view(), out_.channel_scale.view());
  }

  Status unsigned_codes(std::int64_t /*rows_per_part*/) {
    if (quant_.zero_point != ZeroPoint::kInteger) return unsupported(quant_);
    const bool four = quant_.dtype == DType::kU4;
    const bool whole = per(ScaleGranularity::kChannel);
    const std::int64_t group = whole ? -1 : quant_.block_k;
    Shape groups{rows(), 1};
    if (!whole) {
      MOESAIC_ASSIGN_OR_RETURN(groups, grid());
    }
    Tensor codes;
    MOESAIC_RETURN_IF_ERROR(make(&codes, DType::kU8, w_.shape));
    Tensor scale, zero;
    MOESAIC_RETURN_IF_ERROR(make(&scale, DType::kF32, groups));
    MOESAIC_RETURN_IF_ERROR(make(&zero, DType::kU8, groups));
    MOESAIC_RETURN_IF_ERROR(quantize_uint_group(w_, {four ? 4 : 8, group, {}}, codes.view(),
                                                scale.view(), zero.view()));
    if (whole) {  // one column in the quantiser's form, none in the scheme's
      MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, {rows()}));
      MOESAIC_RETURN_IF_ERROR(make(&out_.zero, DType::kU8, {rows()}));
      for (std::int64_t n = 0; n < rows(); ++n) {
        out_.scale.as<float>()[n] = scale.as<float>()[n];
        out_.zero.as<std::uint8_t>()[n] = zero.as<std::uint8_t>()[n];
      }
    } else {
      out_.scale = std::move(scale);
      out_.zero = std::move(zero);
    }
    if (four) return pack(codes);
    out_.weight = std::move(codes);
    return {};
  }

  // Blocks of bitsandbytes, which fall on whole rows here.
  Status table(std::int64_t /*rows_per_part*/) {
    if (cols() % std::max<std::int64_t>(quant_.block_k, 1) != 0) {
      return unsupported(quant_);
    }
    MOESAIC_ASSIGN_OR_RETURN(const Shape groups, grid());
    MOESAIC_RETURN_IF_ERROR(make(&out_.weight, DType::kU4, w_.shape));
    MOESAIC_RETURN_IF_ERROR(make(&out_.scale, DType::kF32, groups));
    const TensorView bytes(out_.weight.data(), DType::kU8, {(rows() * cols() + 1) / 2});
    const TensorView absmax(out_.scale.data(), DType::kF32, {groups[0] * groups[1]});
    MOESAIC_RETURN_IF_ERROR(quantize_bnb4(w_, quant_.table, quant_.block_k, bytes, absmax));
    return swap_nibbles(bytes, bytes);
  }

  const OperandQuant& quant_;
  ConstTensorView w_;
  QuantizedMatrix out_;

 public:
  // How numbers become an operand's format, and what that costs.
  struct Quantiser {
    DType dtype;
    ScaleFormat scale_format;
    CodeTable table;
    Status (Builder::*run)(std::int64_t rows_per_part);  // null: read only
    double error;                                        // see rounding_error
  };
  static const Quantiser* quantiser(const OperandQuant& q);
};

const Builder::Quantiser* Builder::quantiser(const OperandQuant& q) {
  using F = ScaleFormat;
  using T = CodeTable;
  static constexpr auto kQuantisers = std::to_array<Quantiser>({
      {DType::kF32, F::kNone, T::kNone, &Builder::plain, 6e-8},
      {DType::kBF16, F::kNone, T::kNone, &Builder::plain, 0.00166},
      {DType::kF16, F::kNone, T::kNone, &Builder::plain, 0.00021},
      {DType::kF8E4M3, F::kF32, T::kNone, &Builder::fp8, 0.0266},
      {DType::kF8E4M3, F::kE8M0, T::kNone, &Builder::mx, 0.0266},
      {DType::kF4E2M1, F::kE8M0, T::kNone, &Builder::mx, 0.1119},
      {DType::kF4E2M1, F::kE4M3, T::kNone, &Builder::nvfp4, 0.0952},
      {DType::kI8, F::kF32, T::kNone, &Builder::int8, 0.0078},
      {DType::kU8, F::kF32, T::kNone, &Builder::unsigned_codes, 0.0078},
      {DType::kI4, F::kF32, T::kNone, &Builder::int4, 0.1103},
      {DType::kI4, F::kE4M3, T::kNone, &Builder::int4, 0.1147},
      {DType::kU4, F::kF32, T::kNone, &Builder::unsigned_codes, 0.0919},
      {DType::kU4, F::kF32, T::kNf4, &Builder::table, 0.0919},
      {DType::kU4, F::kF32, T::kFp4, &Builder::table, 0.13},
      {DType::kU4, F::kF32, T::kIq4Nl, nullptr, 0.0919},
  });
  for (const Quantiser& row : kQuantisers) {
    if (row.dtype == q.dtype && row.scale_format == q.scale_format && row.table == q.table) {
      return &row;
    }
  }
  return nullptr;
}

Status Builder::run(std::int64_t rows_per_part) {
  const Quantiser* found = quantiser(quant_);
  const bool possible = found != nullptr && found->run != nullptr && !quant_.act_order &&
                        quant_.zero_point != ZeroPoint::kMin;
  return possible ? (this->*found->run)(rows_per_part) : unsupported(quant_);
}

ConstTensorView view_of(const Tensor& t) { return t.present() ? t.view() : ConstTensorView(); }

}  // namespace

StoredMatrix QuantizedMatrix::view() const {
  return {view_of(weight),
          view_of(scale),
          view_of(global_scale),
          view_of(channel_scale),
          view_of(zero),
          {},
          {}};
}

double rounding_error(const OperandQuant& q) {
  const Builder::Quantiser* found = Builder::quantiser(q);
  return found != nullptr ? found->error : std::numeric_limits<double>::infinity();
}

Result<QuantizedMatrix> quantize_weight(const OperandQuant& quant, ConstTensorView w,
                                        std::int64_t rows_per_part) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix("w", w));
  MOESAIC_RETURN_IF_ERROR(check_arguments({{"w", w, accept(DType::kF32), w.shape}}));
  MOESAIC_RETURN_IF_ERROR(expect_finite("w", w));
  Builder builder(quant, w);
  MOESAIC_RETURN_IF_ERROR(builder.run(rows_per_part));
  return builder.take();
}

}  // namespace moesaic::quant
