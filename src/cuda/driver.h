// CUDA's driver, whose library nothing here links: its functions are found by the runtime.
#pragma once

#include "moesaic/status.h"

namespace moesaic::cuda {

// `name` as it is since CUDA `version` (1000 * major + 10 * minor). kDevice without a driver,
// kUnsupported where the one that is there has no such function.
Result<void*> driver_function(const char* name, int version);

}  // namespace moesaic::cuda
