// ExpertSource over stacked tensors: the leading axis is the local expert.
#include <fmt/format.h>

#include "moesaic/experts.h"

namespace moesaic {
namespace {

// Slice `e` of a stacked tensor; an absent tensor stays absent.
// rank 0: any, what is left is checked against the problem later.
Result<ConstTensorView> slice(std::string_view field, const ConstTensorView& t, int rank,
                              std::int64_t e) {
  if (!t.present()) return ConstTensorView();
  if (rank == 0 && t.rank() > 0) rank = t.rank();
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
    const auto take = [e](const char* field, const ConstTensorView& t, int rank,
                          ConstTensorView& to) -> Status {
      MOESAIC_ASSIGN_OR_RETURN(to, slice(field, t, rank, e));
      return {};
    };
    MOESAIC_RETURN_IF_ERROR(take("w13", w_.w13, 3, v.w13));
    MOESAIC_RETURN_IF_ERROR(take("w13_scale", w_.w13_scale, 0, v.w13_scale));
    MOESAIC_RETURN_IF_ERROR(take("w13_bias", w_.w13_bias, 2, v.w13_bias));
    MOESAIC_RETURN_IF_ERROR(take("w2", w_.w2, 3, v.w2));
    MOESAIC_RETURN_IF_ERROR(take("w2_scale", w_.w2_scale, 0, v.w2_scale));
    MOESAIC_RETURN_IF_ERROR(take("w2_bias", w_.w2_bias, 2, v.w2_bias));
    MOESAIC_RETURN_IF_ERROR(take("w13_global_scale", w_.w13_global_scale, 2, v.w13_global_scale));
    MOESAIC_RETURN_IF_ERROR(take("w2_global_scale", w_.w2_global_scale, 2, v.w2_global_scale));
    MOESAIC_RETURN_IF_ERROR(
        take("w13_channel_scale", w_.w13_channel_scale, 2, v.w13_channel_scale));
    MOESAIC_RETURN_IF_ERROR(take("w2_channel_scale", w_.w2_channel_scale, 2, v.w2_channel_scale));
    MOESAIC_RETURN_IF_ERROR(take("w13_zero", w_.w13_zero, 0, v.w13_zero));
    MOESAIC_RETURN_IF_ERROR(take("w2_zero", w_.w2_zero, 0, v.w2_zero));
    MOESAIC_RETURN_IF_ERROR(take("w13_min", w_.w13_min, 0, v.w13_min));
    MOESAIC_RETURN_IF_ERROR(take("w2_min", w_.w2_min, 0, v.w2_min));
    MOESAIC_RETURN_IF_ERROR(take("w13_input_scale", w_.w13_input_scale, 2, v.w13_input_scale));
    MOESAIC_RETURN_IF_ERROR(take("w2_input_scale", w_.w2_input_scale, 2, v.w2_input_scale));
    MOESAIC_RETURN_IF_ERROR(take("w13_perm", w_.w13_perm, 2, v.w13_perm));
    MOESAIC_RETURN_IF_ERROR(take("w2_perm", w_.w2_perm, 2, v.w2_perm));
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
