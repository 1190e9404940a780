// What RoutedExperts.from_tensors is called with, as the library's own types.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/spec.h"
#include "own_weights.h"
#include "tensors.h"

namespace moesaic::python {

struct OwnArguments {
  OwnWeights weights;  // views into `keep`
  std::vector<TensorArg> keep;
  std::vector<Tensor> widened;  // biases in F16, as the F32 that the library takes
  MoeLayerSpec spec;            // sizes from the tensors
};

// How gate and up lie in the rows of w13; "gate_then_up", the default, is also nothing without a gate.
// kInvalidArgument for names that there are not, and for those that contradict the activation.
GateUpLayout layout_of(const std::string& gate_up, ActivationKind activation);

// `function`: its name, for a TypeError. `fields`: the tensors beside w13 and w2, by the names of ExpertWeightsView; TypeError for another
// name. Raises.
OwnArguments own_arguments(nanobind::handle w13, nanobind::handle w2, std::int64_t top_k,
                           const std::optional<std::string>& stored, nanobind::handle activation,
                           const std::string& gate_up, bool transposed,
                           bool apply_router_weight_on_input, std::string_view function,
                           const nanobind::kwargs& fields);

}  // namespace moesaic::python
