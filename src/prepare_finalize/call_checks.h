// Checks of what prepare and finalize are given in host memory: a ModularKernel has made them, another
// caller may not have. None reads a value.
#pragma once

#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::prepare_finalize {

// Rows [M, H] and their routing as PrepareArgs says. kInvalidShape, kInvalidDType, kInvalidLayout,
// kInvalidArgument (null, memory of a GPU), kLimitExceeded. Allocates nothing when it succeeds.
Status check_prepare_args(const MoeProblem& problem, const PrepareArgs& args);

// Output [M, H], what the experts left (of whatever shape) and the routing, unless nothing is left to
// be weighted. The same errors.
Status check_finalize_args(const MoeProblem& problem, const FinalizeArgs& args);

}  // namespace moesaic::prepare_finalize
