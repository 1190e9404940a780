// What a layer says of itself in one line.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "layer/fused_impl.h"

namespace moesaic {
namespace {

// "experts 16 to 31 of 64", "experts 1, 5, 9 ... of 64", "64 experts".
std::string experts_text(const std::vector<std::int32_t>& map, std::int64_t experts,
                         std::int64_t local) {
  if (map.empty()) return fmt::format("{} experts", experts);
  if (local == 0) return fmt::format("no experts of {}", experts);
  std::vector<std::int64_t> mine;
  for (std::size_t e = 0; e < map.size(); ++e) {
    if (map[e] >= 0) mine.push_back(static_cast<std::int64_t>(e));
  }
  if (mine.back() - mine.front() + 1 == local) {
    return fmt::format("experts {} to {} of {}", mine.front(), mine.back(), experts);
  }
  constexpr std::size_t kShown = 3;
  const bool all = mine.size() <= kShown;
  if (!all) mine.resize(kShown);
  return fmt::format("experts {}{} of {}", fmt::join(mine, ", "), all ? "" : " ...", experts);
}

std::string ranks_text(const ParallelConfig& p, const layer::RankPlan& ranks, bool reduced) {
  if (p.flat_size() == 1) return "one rank";
  std::string text = fmt::format("rank {} of {} (tp {}, ep {}, dp {}", p.flat_rank(), p.flat_size(),
                                 p.tp_size, p.ep_size, p.dp_size);
  if (p.pcp_size > 1) text += fmt::format(", pcp {}", p.pcp_size);
  if (p.is_sequence_parallel()) text += ", sequence parallel";
  text += ranks.active ? fmt::format(") by {}", rank_transport_name(ranks.transport))
                       : std::string(") without a communicator");
  return text + (reduced ? ", complete sums" : ", partial sums");
}

}  // namespace

std::string FusedMoE::summary() const {
  const Impl& m = *impl_;
  const layer::FusedPlan& plan = m.plan;
  std::string name = spec().prefix.empty() ? spec().model_type : spec().prefix;
  if (name.empty()) name = "layer";
  std::string text = fmt::format(
      "{}: {}, {} per token, hidden {}, intermediate {}, {}, {}", name,
      experts_text(plan.expert_map, plan.routed.num_experts, plan.routed.num_local_experts),
      plan.routing.top_k, plan.hidden_size, plan.routed.intermediate_size,
      activation_name(spec().activation.kind), m.router_name);
  if (plan.latent_size != plan.hidden_size) text += fmt::format(", latent {}", plan.latent_size);
  if (spec().shared.intermediate_size > 0) {
    text += fmt::format(", shared {}{}", spec().shared.intermediate_size,
                        plan.has_shared ? "" : " (not here)");
  }
  if (plan.has_zero_experts)
    text += fmt::format(", {} identity experts", plan.routing.num_zero_experts);
  text += fmt::format(", {} by {} on {}, {}", quant().name, experts_backend(), device().to_string(),
                      ranks_text(m.options.parallel, plan.ranks, output_is_reduced()));
  const std::string engine = m.engine->rank_engine();
  return engine.empty() ? text : fmt::format("{}, {}", text, engine);
}

}  // namespace moesaic
