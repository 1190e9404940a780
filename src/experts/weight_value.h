// One stored weight as a number: the dequantisation of every format, one element at a time. For
// references and error measurements; not fast.
#pragma once

#include <cstdint>

#include "experts/reference/matrix.h"
#include "moesaic/quant.h"

namespace moesaic::experts {

// Element [n, k] of a projection whose tensors have passed check_expert_weights, all scales of the
// weight included, k counted in the stored order of columns. Exact products in double; int4 with
// e4m3 group scales includes that scheme's rounding of scale times code.
double weight_value(const OperandQuant& weight, const ProjectionView& view, std::int64_t n,
                    std::int64_t k);

}  // namespace moesaic::experts
