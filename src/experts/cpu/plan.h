// What a problem, its weight formats and a tier's kernels make of the CPU backends' rows.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "experts/cpu/weight_format.h"
#include "experts/cpu/workspace.h"
#include "moesaic/experts.h"

namespace moesaic::experts {

CpuPlan make_cpu_plan(const MoeProblem& problem, const CpuWeightFormats& formats,
                      const cpu::CpuKernels& kernels);

// Workspace of a call with that many tokens (standard format) or rows per expert (batched).
Result<std::int64_t> cpu_workspace_bytes(const CpuPlan& plan, std::int64_t tokens);

}  // namespace moesaic::experts
