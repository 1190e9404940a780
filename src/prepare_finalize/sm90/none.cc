// A build without CUDA: the rows stand in the catalogue and refuse.
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/slot_sums.h"

namespace moesaic::cuda {

// NOLINTBEGIN(performance-unnecessary-value-param): the signature of the other build
Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_all_to_all(const MoeProblem& problem,
                                                                 std::shared_ptr<Communicator>,
                                                                 const AllToAllOptions&) {
  MOESAIC_RETURN_IF_ERROR(sm90_transport_can_implement(problem));
  return check_device(problem.device);
}

Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_batched_all_to_all(
    const MoeProblem& problem, std::shared_ptr<Communicator>, const AllToAllOptions&) {
  MOESAIC_RETURN_IF_ERROR(sm90_slabs_can_travel(problem));
  return check_device(problem.device);
}
// NOLINTEND(performance-unnecessary-value-param)

Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_batched(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(sm90_batched_can_implement(problem));
  return check_device(problem.device);
}

Status reduce_slots(const MoeProblem& problem, const FinalizeArgs&, const std::int32_t*) {
  return check_device(problem.device);
}

}  // namespace moesaic::cuda
