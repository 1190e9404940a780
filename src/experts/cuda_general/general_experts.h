// Experts on a GPU for every size: the last row of their catalogue. Slower than the sm_90 kernel by
// far, plain in what it does.
#pragma once

#include <memory>
#include <string_view>

#include "experts/sm90/experts.h"

namespace moesaic::cuda {

inline constexpr std::string_view kGeneralExpertsName = "cuda_general";
inline constexpr std::string_view kGeneralExpertsDeterminism =
    "bitwise repeatable: a row's result depends on that row, its ids and weights only, not on "
    "batch, neighbours, order or replay";

// Computes what experts/reference/experts.h defines. Products are fp32 multiply-adds in ascending
// columns, folded every 128 of them; an expert's rows stay fp32 until the sum over a token's
// experts is rounded to the output. Rows of BF16, F16 or F32, whatever the scheme.
//   Errors of can_implement; kDevice (no device, wrong architecture), kOutOfMemory, the source's.
Result<std::unique_ptr<GpuExperts>> make_general_gpu_experts(const MoeProblem& problem,
                                                             ExpertSource& source, int device);

}  // namespace moesaic::cuda
