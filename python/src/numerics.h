// moesaic.Numerics: what rounding did to the rows of one call.
#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "moesaic/fused_moe.h"
#include "tensors.h"

namespace moesaic::python {

// Of the rows of a call of `layer` with an output of this dtype; tensors of the kind of `x`.
nanobind::object numerics_of(const FusedMoE& layer, std::span<const RowNumerics> rows, DType output,
                             const TensorArg& x);

void bind_numerics(nanobind::module_& m);

}  // namespace moesaic::python
