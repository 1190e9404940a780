// What explain says of threads.
#include <string>
#include <utility>

#include "cpu/team.h"
#include "cpu/tiers.h"
#include "experts/cpu/experts.h"
#include "gate/cpu/gate.h"
#include "layer/fused_plan.h"
#include "router/route_row.h"

namespace moesaic {
namespace {

// threads_of(tokens) never shrinks with more tokens.
template <class ThreadsOf>
StageThreads stage_threads(std::string stage, std::int64_t max_tokens, ThreadsOf&& threads_of) {
  std::int64_t one = 0, many = max_tokens + 1;  // the largest known, the smallest known
  while (many - one > 1) {
    const std::int64_t middle = one + (many - one) / 2;
    (threads_of(middle) == 1 ? one : many) = middle;
  }
  return {std::move(stage), threads_of(max_tokens), one};
}

StageThreads experts_threads(std::string stage, const MoeProblem& problem, std::int64_t max_tokens,
                             std::string_view backend) {
  constexpr std::string_view kPrefix = "cpu_";
  return stage_threads(std::move(stage), max_tokens, [&](std::int64_t tokens) {
    // The reference, which is no tier, has one thread.
    if (!backend.starts_with(kPrefix)) return 1;
    const Result<int> threads =
        cpu_experts_threads(backend.substr(kPrefix.size()), problem, tokens);
    return threads.ok() ? *threads : 1;
  });
}

}  // namespace

std::vector<StageThreads> explain_threads(const FusedPlan& plan, std::int64_t max_tokens,
                                          std::string_view experts_backend,
                                          std::string_view shared_backend) {
  const int threads = cpu::resolve_threads(plan.routed.num_threads);
  const std::int64_t columns = plan.routing.num_experts + plan.routing.num_zero_experts;
  std::vector<StageThreads> stages;
  stages.push_back(stage_threads("gate", max_tokens, [&](std::int64_t tokens) {
    return cpu::team_size(cpu_gate_us(tokens, columns, plan.hidden_size), threads);
  }));
  stages.push_back(stage_threads("router", max_tokens, [&](std::int64_t tokens) {
    return cpu::team_size(route_rows_us(tokens, columns), threads);
  }));
  stages.push_back(experts_threads("experts", plan.routed, max_tokens, experts_backend));
  if (plan.has_shared) {
    stages.push_back(experts_threads("shared_experts", plan.shared, max_tokens, shared_backend));
  }
  return stages;
}

}  // namespace moesaic
