// Predicates of the prepare/finalize list.
#pragma once

#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::prepare_finalize {

Status local_can_implement(const MoeProblem& problem);
Status batched_can_implement(const MoeProblem& problem);
// What every transport between ranks requires of the format and the problem.
Status standard_transport_can_implement(const MoeProblem& problem);
Status batched_transport_can_implement(const MoeProblem& problem);

}  // namespace moesaic::prepare_finalize
