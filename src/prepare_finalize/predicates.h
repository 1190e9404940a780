// Predicates of the prepare/finalize list.
#pragma once

#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic {

Status local_can_implement(const MoeProblem& problem);
Status batched_can_implement(const MoeProblem& problem);

}  // namespace moesaic
