// Simulated routing for load experiments: ids and weights from a random generator instead of
// logits. Source: docs/spec/routing.md section 7.3.
#pragma once

#include <string>

#include "moesaic/interop/own_layer.h"
#include "moesaic/status.h"

namespace moesaic::router {

// The built-in or registered strategy of this name; kNotFound lists the known names.
//   uniform_random  each id uniform on [0, E), with replacement; weights 1
//   normal_routing  id = clamp(floor(sigmoid(N(0,1)) * E), 0, E - 1); weights |N(0,1)|, sum 1
// Row t draws from a generator seeded by (seed, t): the first rows of a longer batch are the same.
Result<SimulationStrategyFn> find_simulation_strategy(const std::string& name);

}  // namespace moesaic::router
