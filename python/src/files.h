// moesaic.Checkpoint, TensorFile, convert, explain.
#pragma once

#include <nanobind/nanobind.h>

namespace moesaic::python {

void bind_files(nanobind::module_& m);

}  // namespace moesaic::python
