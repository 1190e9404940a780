// Predicates of the prepare/finalize list.
#pragma once

#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::prepare_finalize {

Status local_can_implement(const MoeProblem& problem);
Status batched_can_implement(const MoeProblem& problem);
// Of the transports between ranks, whatever the ranks: format and problem.
Status standard_transport_can_implement(const MoeProblem& problem);
Status batched_transport_can_implement(const MoeProblem& problem);

}  // namespace moesaic::prepare_finalize
