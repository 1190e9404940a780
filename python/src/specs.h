// Plain data of the library as Python objects: LayerSpec, Routing, Activation, Explanation.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "moesaic/device.h"
#include "moesaic/fused_moe.h"
#include "moesaic/spec.h"

namespace moesaic::python {

void bind_specs(nanobind::module_& m);

// "silu", or a moesaic.Activation.
ActivationSpec activation_of(nanobind::handle activation);
// A scheme of quant_schemes() or stored_schemes(), kNotFound else.
Scheme scheme_of(const std::string& name);
DType dtype_of(std::string_view field, const std::string& name);
// num_threads= of a layer: None means PyTorch's number where PyTorch is imported, else 0.
int threads_of(nanobind::handle num_threads);
Device device_of(nanobind::handle device);

}  // namespace moesaic::python
