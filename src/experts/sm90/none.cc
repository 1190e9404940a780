// A build without CUDA: the rows stand in the catalogue and refuse.
#include "experts/sm90/catalogue_row.h"

namespace moesaic::cuda {

Result<std::unique_ptr<Experts>> make_sm90_experts(const MoeProblem& problem, ExpertSource&) {
  MOESAIC_RETURN_IF_ERROR(sm90_experts_can_implement(problem));
  return check_device(problem.device);
}

Result<std::unique_ptr<Experts>> make_general_experts(const MoeProblem& problem, ExpertSource&) {
  MOESAIC_RETURN_IF_ERROR(general_experts_can_implement(problem));
  return check_device(problem.device);
}

}  // namespace moesaic::cuda
