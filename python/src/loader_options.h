// What a WeightLoader is made with beside a layer: ExpertNames and Parallel as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include "moesaic/parallel.h"
#include "moesaic/weight_loader.h"

namespace moesaic::python {

void bind_loader_options(nanobind::module_& m);

// None, or a moesaic.Parallel. Raises.
ParallelConfig parallel_of(nanobind::handle parallel);

}  // namespace moesaic::python
