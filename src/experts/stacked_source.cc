// ExpertSource over stacked tensors: the leading axis is the local expert.
#include <fmt/format.h>

#include "experts/expert_fields.h"
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
  ConstTensorView view(t.data + e * (t.strides[0] * bits / 8), t.dtype, shape, t.device);
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
    for (const experts::ExpertField& field : experts::kExpertFields) {
      MOESAIC_ASSIGN_OR_RETURN(v.*field.view,
                               slice(field.name, w_.*field.view, field.stacked_rank, e));
    }
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
