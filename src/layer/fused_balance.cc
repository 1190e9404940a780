// Expert load balancing of a FusedMoE: measuring, the caller's maps, moving, switching.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/fault.h"
#include "core/guarded.h"
#include "core/refusal.h"
#include "layer/expert_balancer.h"
#include "layer/fused_impl.h"
#include "moesaic/eplb.h"

namespace moesaic {
namespace {

Status no_balancing() {
  return unsupported("enable_eplb: got false when the layer was made, need true to move experts");
}

// Ranks whose layers do not talk to each other know their own part only.
Status need_communicator(std::string_view what, int ranks) {
  return unsupported(
      fmt::format("{}: got a layer without a communicator on {} ranks, need one, or a caller who "
                  "measures and moves (set_eplb_state, get_expert_weights)",
                  what, ranks));
}

}  // namespace

std::vector<std::int32_t> FusedMoE::physical_to_logical() const {
  if (impl_->engine->balancer() == nullptr) return {};
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const auto map = impl_->engine->balancer()->physical_to_logical();
  return {map.begin(), map.end()};
}

Result<std::vector<double>> FusedMoE::measured_load() const {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const int ranks = impl_->options.parallel.ep_size;
  if (!impl_->mesh && ranks > 1) return need_communicator("measured_load", ranks);
  return impl_->engine->balancer()->load(impl_->mesh ? impl_->mesh->world().get() : nullptr,
                                         impl_->plan.ranks.replicas);
}

Status FusedMoE::set_eplb_recording(bool record) {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->engine->balancer()->set_recording(record);
}

Status FusedMoE::set_eplb_state(const EplbState& state,
                                std::span<const std::int32_t> physical_to_logical) {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  layer::ExpertBalancer& balancer = *impl_->engine->balancer();
  Result<ExpertMaps> maps = balancer.check_state(state, physical_to_logical);
  if (impl_->mesh && !MOESAIC_FAULT(eplb_ranks_may_have_other_maps)) {
    // Rows go by the maps of the rank that they come from, to weights of another.
    const Result<std::int64_t> value = without_exceptions("eplb", [&]() -> Result<std::int64_t> {
      MOESAIC_RETURN_IF_ERROR(maps.status());
      return layer::fingerprint_of(fmt::format(
          "{} {} {}", fmt::join(maps->logical_to_physical, ","),
          fmt::join(maps->replica_count, ","), fmt::join(maps->physical_to_logical, ",")));
    });
    MOESAIC_RETURN_IF_ERROR(layer::agree(*impl_->mesh->world(), "eplb", value.status(),
                                         value.ok() ? *value : 0, "other maps"));
  }
  if (!maps.ok()) return maps.status();
  return balancer.set_state(std::move(maps).value(), state);
}

Status FusedMoE::begin_rearrange(std::span<const std::int32_t> wanted) {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  layer::ExpertBalancer& balancer = *impl_->engine->balancer();
  const int ranks = impl_->options.parallel.ep_size;
  if (!impl_->mesh && ranks > 1) return need_communicator("begin_rearrange", ranks);
  const Result<std::vector<ExpertPart>> parts = impl_->engine->expert_parts();
  const auto make_room = [&](Communicator* world) {
    Status made = balancer.make_room(world, *parts);
    if (!made.ok()) balancer.drop();
    return made;
  };
  const bool was_in_flight = balancer.in_flight();
  const Status begun = parts.ok() ? balancer.begin(wanted) : parts.status();
  if (!impl_->mesh) {
    MOESAIC_RETURN_IF_ERROR(begun);
    return make_room(nullptr);
  }
  const Result<std::int64_t> value = without_exceptions("rearrange", [&]() -> Result<std::int64_t> {
    MOESAIC_RETURN_IF_ERROR(begun);
    std::string sizes;
    for (const ExpertPart& part : *parts)
      sizes += fmt::format(" {} {}", part.name, part.rows.dim(1));
    return layer::fingerprint_of(fmt::format("{}{}", fmt::join(wanted, ","), sizes));
  });
  Status agreed =
      layer::agree(*impl_->mesh->world(), "rearrange", value.status(), value.ok() ? *value : 0,
                   "another placement wanted, or other weights,");
  if (!agreed.ok()) {
    if (!was_in_flight) balancer.drop();
    return agreed;
  }
  return make_room(impl_->mesh->world().get());
}

Result<std::vector<std::int32_t>> FusedMoE::plan_rebalance(std::span<const double> load,
                                                           int num_nodes) const {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  if (std::ssize(load) != impl_->spec.num_experts) {
    return Status(invalid(
        fmt::format("load: got {} experts, need {}", load.size(), impl_->spec.num_experts)));
  }
  EplbShape shape;
  shape.num_physical = impl_->plan.routed.num_experts;
  shape.num_ranks = impl_->options.parallel.ep_size;
  shape.num_nodes = num_nodes;
  shape.num_groups = static_cast<int>(impl_->spec.routing.num_expert_group);
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int32_t> placed, rebalance_experts(load, shape));
  // Of equals the first is copied: an idle layer would have all copies of its first expert.
  if (std::count(load.begin(), load.end(), 0.0) == std::ssize(load) &&
      !MOESAIC_FAULT(eplb_rearranges_idle_layers)) {
    return physical_to_logical();
  }
  return preserve_slots(physical_to_logical(), placed, shape.num_ranks);
}

Status FusedMoE::begin_rebalance(int num_nodes) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> load, measured_load());
  const Result<std::vector<std::int32_t>> wanted =
      without_exceptions("rebalance", [&] { return plan_rebalance(load, num_nodes); });
  if (wanted.ok()) return begin_rearrange(*wanted);
  if (!impl_->mesh || MOESAIC_FAULT(eplb_others_wait_for_a_refused_plan)) return wanted.status();
  // The others may be in begin_rearrange.
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return layer::agree(*impl_->mesh->world(), "rearrange", wanted.status(), 0, {});
}

Result<bool> FusedMoE::continue_rearrange(std::int64_t max_transfers) {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  const Result<std::vector<ExpertPart>> parts = impl_->engine->expert_parts();
  if (!parts.ok()) return impl_->mesh ? impl_->mesh->give_up(parts.status()) : parts.status();
  return impl_->engine->balancer()->advance(impl_->mesh ? impl_->mesh->world().get() : nullptr,
                                            max_transfers, *parts);
}

}  // namespace moesaic
