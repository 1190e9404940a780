// A build without CUDA: the row stands in the catalogue and refuses.
#include "experts/sm90/catalogue_row.h"

namespace moesaic::cuda {

Result<std::unique_ptr<Experts>> make_sm90_experts(const MoeProblem& problem, ExpertSource&) {
  MOESAIC_RETURN_IF_ERROR(sm90_experts_can_implement(problem));
  return check_device(problem.device);
}

}  // namespace moesaic::cuda
