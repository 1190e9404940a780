// The fast CPU backends of the experts stage: one per instruction-set tier, all from the same code.
#pragma once

#include <memory>
#include <string_view>

#include "cpu/kernels.h"
#include "moesaic/experts.h"

namespace moesaic::experts {

// Computes what experts/reference/experts.h defines, with these orders of summation (see
// cpu/kernels.h): each group of 128 steps of K in one fp32 chain (bf16 pairs on the bf16 tier; on
// tier amx products of 32 steps, docs/design/cpu-gemm.md), groups folded in ascending order with a
// fused multiply-add; a token's slots in ascending order.
// Thus the bits of a row depend on that row, its ids and weights and the tier; not on batch, split,
// row order or threads.
//
// Weights are repacked once at creation, one expert at a time; no decoded copy exists. Rows are
// processed in chunks, so the workspace stops growing at about 8192 (token, slot) pairs, on tier amx
// at 16384.
//
// Error against exact arithmetic on the same operands, for each dot product of length K:
//   <= (min(K, 128) + ceil(K / 128) + 2) * 2^-24 * sum |x*w|.
//
// The tier must be one of cpu_tiers(). `tier` "auto" is not accepted here: the catalogue has one
// row per tier.
Status cpu_experts_can_implement(std::string_view tier, const MoeProblem& problem);
Result<std::unique_ptr<Experts>> make_cpu_experts(std::string_view tier, const MoeProblem& problem,
                                                  ExpertSource& source);
// On a table of kernels that outlives them, and of which nothing is asked.
Result<std::unique_ptr<Experts>> make_cpu_experts(const cpu::CpuKernels& kernels,
                                                  const MoeProblem& problem, ExpertSource& source);
Result<std::int64_t> cpu_experts_workspace_size(std::string_view tier, const MoeProblem& problem,
                                                std::int64_t tokens);
// Threads of a call with that many tokens: one where it is a matter of microseconds (cpu/team.h).
Result<int> cpu_experts_threads(std::string_view tier, const MoeProblem& problem,
                                std::int64_t tokens);
inline constexpr std::string_view kCpuExpertsDeterminism =
    "bitwise repeatable per CPU tier: a row's result depends on that row, its ids and weights "
    "only, "
    "not on threads, batch, split or order";

}  // namespace moesaic::experts
