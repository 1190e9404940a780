// Expert load balancing of a FusedMoE: measuring, moving, switching.
#include <fmt/format.h>

#include "layer/expert_balancer.h"
#include "layer/fused_impl.h"
#include "moesaic/eplb.h"

namespace moesaic {
namespace {

Status no_balancing() {
  return {StatusCode::kUnsupported,
          "enable_eplb: got false when the layer was made, need true to move experts"};
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
  return impl_->engine->balancer()->load(*impl_->mesh->world(), impl_->plan.ranks.replicas);
}

Status FusedMoE::begin_rearrange(std::span<const std::int32_t> wanted) {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  layer::ExpertBalancer& balancer = *impl_->engine->balancer();
  const bool was_in_flight = balancer.in_flight();
  const Status begun = balancer.begin(wanted);
  Status agreed = layer::agree(
      *impl_->mesh->world(), "rearrange", begun,
      layer::fingerprint_of(fmt::format("{} {}", fmt::join(wanted, ","), balancer.expert_bytes())));
  if (!agreed.ok() && !was_in_flight) balancer.drop();
  return agreed;
}

Status FusedMoE::begin_rebalance(int num_nodes) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> load, measured_load());
  const RoutingSpec& routing = impl_->spec.routing;
  EplbShape shape;
  shape.num_physical = impl_->plan.routed.num_experts;
  shape.num_ranks = impl_->plan.ranks.size;
  shape.num_nodes = num_nodes;
  shape.num_groups = static_cast<int>(routing.num_expert_group);
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int32_t> placed, rebalance_experts(load, shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int32_t> wanted,
                           preserve_slots(physical_to_logical(), placed, impl_->plan.ranks.size));
  return begin_rearrange(wanted);
}

Result<bool> FusedMoE::continue_rearrange(std::int64_t max_transfers) {
  if (impl_->engine->balancer() == nullptr) return no_balancing();
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->engine->continue_rearrange(max_transfers);
}

}  // namespace moesaic
