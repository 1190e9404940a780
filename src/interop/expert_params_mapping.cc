// Names of expert tensors to parameters and physical experts.
#include <fmt/format.h>

#include <limits>
#include <new>

#include "core/fault.h"
#include "moesaic/interop/expert_weights.h"

namespace moesaic {

std::string_view expert_shard_name(ExpertShard shard) {
  switch (shard) {
    case ExpertShard::kW1:
      return "w1";
    case ExpertShard::kW2:
      return "w2";
    case ExpertShard::kW3:
      return "w3";
  }
  return "";
}

Result<std::vector<ExpertParamsMapping>> make_expert_params_mapping(
    std::string_view gate, std::string_view down, std::string_view up, std::int64_t num_experts,
    std::int64_t num_redundant, bool base_layer) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (num_experts < 1 || num_experts > kMax) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_experts: got {}, need 1 .. {}", num_experts, kMax));
  }
  if (num_redundant < 0 || num_redundant > kMax - num_experts) {
    return Status(StatusCode::kInvalidArgument, fmt::format("num_redundant: got {}, need 0 .. {}",
                                                            num_redundant, kMax - num_experts));
  }
  if (gate.empty() || down.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: got an empty name, need that of a linear",
                              gate.empty() ? "gate" : "down"));
  }
  const std::string_view base = base_layer ? "base_layer." : "";
  try {
    std::vector<ExpertParamsMapping> mapping;
    for (std::int64_t p = 0; p < num_experts + num_redundant; ++p) {
      const auto add = [&](std::string_view name, ExpertShard shard) {
        if (name.empty()) return;
        const std::string_view half = shard == ExpertShard::kW2 ? "w2_" : "w13_";
        mapping.push_back({fmt::format("experts.{}{}", base, half),
                           fmt::format("experts.{}.{}.{}", p % num_experts, name, base), p, shard});
      };
      add(gate, ExpertShard::kW1);
      add(down, ExpertShard::kW2);
      add(up, ExpertShard::kW3);
    }
    return mapping;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the mapping of experts");
  }
}

std::vector<ExpertParamTarget> expert_param_targets(std::span<const ExpertParamsMapping> mapping,
                                                    std::string_view name) {
  std::vector<ExpertParamTarget> targets;
  for (const ExpertParamsMapping& rule : mapping) {
    for (std::size_t at = name.find(rule.pattern); at != name.npos;
         at = name.find(rule.pattern, at + 1)) {
      if (at > 0 && name[at - 1] != '.') continue;  // "shared_experts."
      targets.push_back({fmt::format("{}{}{}", name.substr(0, at), rule.param,
                                     name.substr(at + rule.pattern.size())),
                         rule.physical_expert, rule.shard});
      break;
    }
    // The other copies of an expert want the tensor as well.
    if (MOESAIC_FAULT(loader_first_replica_only) && !targets.empty()) break;
  }
  return targets;
}

}  // namespace moesaic
