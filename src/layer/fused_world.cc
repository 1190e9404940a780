// A FusedMoE whose experts are seen, and whose world changes, while it lives.
#include <fmt/format.h>

#include <new>
#include <utility>

#include "core/guarded.h"
#include "core/refusal.h"
#include "layer/expert_balancer.h"
#include "layer/fused_impl.h"

namespace moesaic {

ParallelConfig FusedMoE::parallel() const { return impl_->options.parallel; }
std::int64_t FusedMoE::global_num_experts() const { return impl_->plan.routed.num_experts; }
std::int64_t FusedMoE::local_num_experts() const { return impl_->plan.routed.num_local_experts; }
std::vector<std::int32_t> FusedMoE::expert_map() const { return impl_->plan.expert_map; }

Result<std::vector<ExpertPart>> FusedMoE::get_expert_weights() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  MOESAIC_ASSIGN_OR_RETURN(std::vector<ExpertPart> parts, impl_->engine->expert_parts());
  if (!parts.empty() || local_num_experts() == 0) return parts;
  return Status(
      unsupported(fmt::format("get_expert_weights: {} hands out no arrays, need another "
                              "experts backend",
                              impl_->engine->experts_backend())));
}

Result<std::unique_ptr<FusedMoE::Impl>> FusedMoE::Impl::in_world(const World& world,
                                                                 ExpertSource& experts) const {
  if (engine->balancer() != nullptr && engine->balancer()->in_flight()) {
    return Status(
        invalid("update_expert_map: a rearrangement is in flight, need to continue it to its end"));
  }
  std::unique_ptr<Impl> next(new (std::nothrow) Impl);
  if (!next) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  next->spec = spec;
  next->shared_stored = shared_stored;
  next->options = options;
  next->router_name = router_name;
  next->options.parallel = world.parallel;
  next->options.ranks.communicator = world.communicator;
  next->options.ranks.num_redundant_experts = world.num_redundant_experts;
  MOESAIC_ASSIGN_OR_RETURN(next->plan, layer::plan_made_layer(spec, shared_stored, next->options));
  next->plan.gate_dtype = plan.gate_dtype;
  if (next->plan.ranks.active) {
    MOESAIC_ASSIGN_OR_RETURN(next->mesh, layer::RankMesh::create(next->options, next->plan.ranks));
  }
  MOESAIC_ASSIGN_OR_RETURN(next->engine,
                           engine->in_world(next->plan, next->options, next->mesh.get(), experts));
  return next;
}

Status FusedMoE::update_expert_map(const World& world, ExpertSource& experts) {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  Result<std::unique_ptr<Impl>> next =
      without_exceptions("update_expert_map", [&] { return impl_->in_world(world, experts); });
  // The agreement of create(), which ranks that are new take part in there.
  MOESAIC_RETURN_IF_ERROR(Impl::agree(world.communicator.get(), next));
  Impl& m = *impl_;
  Impl& n = **next;
  m.plan = std::move(n.plan);
  m.options = std::move(n.options);
  std::swap(m.engine, n.engine);  // the old engine, which knows the old mesh, ends before it
  std::swap(m.mesh, n.mesh);
  return {};
}

}  // namespace moesaic
