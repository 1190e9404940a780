// moesaic.FusedMoE and moesaic.RoutedExperts.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "moesaic/status.h"

namespace moesaic::python {

void bind_layers(nanobind::module_& m);

// Threads and CUDA do not survive fork(): objects remember how many forks this process had when they
// were made, and refuse (kDevice) to be used after another.
std::int64_t fork_count();
void check_not_forked(std::int64_t made_at);

}  // namespace moesaic::python
