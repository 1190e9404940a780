// What the GPU router takes, decided without a device: part of every build.
#include <fmt/format.h>

#include "router/sm90/route.h"
#include "router/sm90/router.h"

namespace moesaic::cuda {

Status CudaRouter::can_implement(const RoutingSpec& spec) {
  if (spec.method == RoutingMethod::kCustom || spec.method == RoutingMethod::kSimulated) {
    return {StatusCode::kUnsupported,
            fmt::format("routing.method: got {}, a function on the host; need one of the library's",
                        routing_method_name(spec.method))};
  }
  if (spec.group_by_best_two && !spec.has_correction_bias) {
    return {StatusCode::kUnsupported,
            "routing.group_by_best_two: got true without a correction bias on a GPU, need false or "
            "the CPU"};
  }
  if (spec.has_expert_scale) {
    return {StatusCode::kUnsupported,
            "routing.has_expert_scale: got true on a GPU, need false or the CPU"};
  }
  const std::int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (columns > kMaxRouteColumns) {
    return {StatusCode::kUnsupported,
            fmt::format("num_experts: got {} with zero experts, need at most {}", columns,
                        kMaxRouteColumns)};
  }
  return {};
}

}  // namespace moesaic::cuda
