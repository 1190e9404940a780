// moesaic.Router and moesaic.GateLinear.
#pragma once

#include <nanobind/nanobind.h>

namespace moesaic::python {

void bind_routing_stages(nanobind::module_& m);

}  // namespace moesaic::python
