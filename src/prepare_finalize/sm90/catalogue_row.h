// The sm_90 rows of prepare_finalize_catalogue(): CudaAllToAll behind the interface that all
// transports have, and the batched reference on a GPU.
#pragma once

#include <memory>
#include <string_view>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// What the transports need of a problem, whatever the ranks. Looks at no device.
Status sm90_transport_can_implement(const MoeProblem& problem);
// Of rows that travel unquantised: what the experts round theirs to. row_name: in texts.
DType row_dtype(const MoeProblem& problem);
std::string_view row_name(DType row);
// Whether rows may be quantised before they leave.
bool travels_as_codes(const MoeProblem& problem);
// The problem that a transport is made for, so that rows of `problem` can travel: itself, or one of
// unquantised rows of a hidden size that is a multiple of 8 (padded_rows.h).
MoeProblem carried_problem(const MoeProblem& problem);
// The same of a problem that is its own carried_problem().
Status sm90_rows_can_travel(const MoeProblem& problem);
// Errors of check_device (in a build without CUDA it refuses every GPU) and of
// CudaAllToAll::create.
Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_all_to_all(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options);

// The batched reference on a GPU: batched_can_implement's answer, then at most 1024 local experts
// and 2^30 rows. Looks at no device.
Status sm90_batched_can_implement(const MoeProblem& problem);
// Errors of check_device. See make_batched_prepare_finalize.
Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_batched(const MoeProblem& problem);

// all_to_all_batched on a GPU: rows by make_sm90_all_to_all's messages, slabs made where they arrive
// (slabbed_rows.h). Looks at no device.
Status sm90_slabs_can_travel(const MoeProblem& problem);
// Errors of make_batched_all_to_all_prepare_finalize and check_device.
Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_batched_all_to_all(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options);

}  // namespace moesaic::cuda
