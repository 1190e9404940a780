// ExpertSource over stacked tensors: the leading axis is the local expert.
#include <fmt/format.h>

#include "moesaic/experts.h"

namespace moesaic {
namespace {

// Slice `e` of a stacked tensor; an absent tensor stays absent.
Result<ConstTensorView> slice(std::string_view field, const ConstTensorView& t, int rank,
                              std::int64_t e) {
  if (!t.present()) return ConstTensorView();
  if (t.rank() != rank) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("{}: got {}, need rank {} with the local experts first", field,
                              t.shape.to_string(), rank));
  }
  if (e < 0 || e >= t.dim(0)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: got local expert {}, need 0 .. {}", field, e, t.dim(0) - 1));
  }
  const std::int64_t bits = dtype_bits(t.dtype);
  if (t.strides[0] * bits % 8 != 0) {
    return Status(StatusCode::kInvalidLayout,
                  fmt::format("{}: got a stride of {} {} elements, need whole bytes", field,
                              t.strides[0], dtype_name(t.dtype)));
  }
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, Shape::from(t.shape.dims().subspan(1)));
  ConstTensorView view(t.data + e * (t.strides[0] * bits / 8), t.dtype, shape);
  for (std::size_t d = 0; d + 1 < static_cast<std::size_t>(rank); ++d) {
    view.strides[d] = t.strides[d + 1];
  }
  return view;
}

class StackedSource final : public ExpertSource {
 public:
  explicit StackedSource(const StackedExpertWeights& weights) : w_(weights) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    ExpertWeightsView v;
    MOESAIC_ASSIGN_OR_RETURN(v.w13, slice("w13", w_.w13, 3, e));
    MOESAIC_ASSIGN_OR_RETURN(v.w13_scale, slice("w13_scale", w_.w13_scale, 3, e));
    MOESAIC_ASSIGN_OR_RETURN(v.w13_bias, slice("w13_bias", w_.w13_bias, 2, e));
    MOESAIC_ASSIGN_OR_RETURN(v.w2, slice("w2", w_.w2, 3, e));
    MOESAIC_ASSIGN_OR_RETURN(v.w2_scale, slice("w2_scale", w_.w2_scale, 3, e));
    MOESAIC_ASSIGN_OR_RETURN(v.w2_bias, slice("w2_bias", w_.w2_bias, 2, e));
    return v;
  }

 private:
  StackedExpertWeights w_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_stacked_source(const StackedExpertWeights& weights) {
  return std::make_unique<StackedSource>(weights);
}

}  // namespace moesaic
