// The rows of GPUs in experts_catalogue(): GpuExperts behind the interface that all experts have.
#pragma once

#include <cstdint>
#include <memory>

#include "moesaic/experts.h"

namespace moesaic::cuda {

// CudaExperts' answer, then that of the device (MoeProblem::device must be a GPU); needs none.
Status sm90_experts_can_implement(const MoeProblem& problem);
Result<std::int64_t> sm90_experts_workspace_size(const MoeProblem& problem, std::int64_t tokens);
// Errors of check_device (in a build without CUDA it refuses every GPU) and of CudaExperts::create.
Result<std::unique_ptr<Experts>> make_sm90_experts(const MoeProblem& problem, ExpertSource& source);

// The same for the general experts, which take every size.
Status general_experts_can_implement(const MoeProblem& problem);
Result<std::int64_t> general_experts_workspace_size(const MoeProblem& problem, std::int64_t tokens);
Result<std::unique_ptr<Experts>> make_general_experts(const MoeProblem& problem,
                                                      ExpertSource& source);

// Everything about a call that needs no GPU to check; addresses are looked at by run. `any_rows`:
// of experts whose rows and output may be F32, BF16 or F16.
Status check_sm90_args(const MoeProblem& problem, const ExpertsArgs& args, bool any_rows = false);
// The same in the batched format.
Status check_slab_args(const MoeProblem& problem, const ExpertsArgs& args, bool any_rows);
// What a call writes, beside what else it has; whether the output may be hidden_states is not looked at.
Status expect_disjoint_args(const MoeProblem& problem, const ExpertsArgs& args);

}  // namespace moesaic::cuda
