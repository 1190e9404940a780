// A projection in the narrower form that its scheme knows of it (moesaic/quant.h, MatrixForms).
#pragma once

#include <string_view>

#include "experts/reference/matrix.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::experts {

// Keeps the tensors of the last matrix.
class FormedMatrix {
 public:
  // `view` of weights in the format `wide` (they have passed check_expert_weights) in `form`: codes
  // of 4 bits where that has them, a scale and a minimum for each of its groups; as it is where the
  // two are equal. Refers to the view's tensors and to this. kInvalidArgument: numbers that have no such form (expert, field, value, place);
  // kOutOfMemory.
  Result<ProjectionView> narrow(const OperandQuant& wide, const OperandQuant& form, std::int64_t e,
                                std::string_view field, const ProjectionView& view);

 private:
  Tensor weight_, scale_, min_;
};

}  // namespace moesaic::experts
