// CudaRouter as a Router: views and a stream in, launches out.
#include "router/device_router.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "cuda/device_memory.h"
#include "router/sm90/router.h"
#include "router/sm90/routing_ops.h"

namespace moesaic::router {
namespace {

class Sm90Router final : public DeviceRouter {
 public:
  Sm90Router(Device device, std::unique_ptr<cuda::CudaRouter> router)
      : device_(device), router_(std::move(router)) {}

  Status select_experts(const Router::Args& args) const override {
    MOESAIC_RETURN_IF_ERROR(check_device_select_args(args, spec(), slots(), device_));
    cuda::CudaRouterArgs a;
    a.tokens = args.router_logits.dim(0);
    if (a.tokens == 0) return {};
    MOESAIC_RETURN_IF_ERROR(check_addresses(args));
    a.router_logits = args.router_logits.data;
    a.logits_dtype = args.router_logits.dtype;
    a.hidden_states = args.hidden_states;
    a.input_ids = args.input_ids.as<std::int32_t>();
    a.padding_mask = args.padding_mask.as<std::uint8_t>();
    a.topk_weights = args.topk_weights.as<float>();
    a.topk_ids = args.topk_ids.data;
    a.ids_dtype = args.topk_ids.dtype;
    if (spec().num_zero_experts == 0) return router_->enqueue(args.stream.handle, a);
    a.zero_expert_weight = reinterpret_cast<float*>(args.workspace.data());
    MOESAIC_RETURN_IF_ERROR(router_->enqueue(args.stream.handle, a));
    return multiply_rows(args, a.zero_expert_weight);
  }
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    if (spec().num_zero_experts == 0) return 0;
    if (tokens > INT64_MAX / 4) {
      return Status(StatusCode::kLimitExceeded,
                    fmt::format("tokens: got {}, need fewer than 2^61", tokens));
    }
    return device_router_workspace(tokens);
  }
  std::int64_t slots() const override { return router_->slots(); }
  const RoutingSpec& spec() const override { return router_->spec(); }
  std::string name() const override { return router_->name(); }

 private:
  // Host memory, or another GPU's, would be read or written long after this call has returned.
  Status check_addresses(const Router::Args& args) const {
    struct Address {
      std::string_view field;
      ConstTensorView view;
      std::int64_t alignment;
    };
    const bool zero_experts = spec().num_zero_experts > 0;
    const auto own = [](const ConstTensorView& t) {
      return std::max(std::int64_t{dtype_bits(t.dtype)} / 8, std::int64_t{1});
    };
    const bool reads_rows = zero_experts || spec().method == RoutingMethod::kCustom;
    for (const Address& at :
         {Address{"router_logits", args.router_logits, own(args.router_logits)},
          Address{"topk_weights", args.topk_weights, 4},
          Address{"topk_ids", args.topk_ids, own(args.topk_ids)},
          Address{"input_ids", args.input_ids, 4}, Address{"padding_mask", args.padding_mask, 1},
          Address{"hidden_states", reads_rows ? args.hidden_states : ConstTensorView(),
                  own(args.hidden_states)},
          Address{"zero_expert_output", args.zero_expert_output, own(args.zero_expert_output)}}) {
      if (!at.view.present()) continue;
      MOESAIC_RETURN_IF_ERROR(
          cuda::check_device_pointer(at.field, at.view.data, at.alignment, device_.index()));
    }
    if (!zero_experts) return {};
    return cuda::check_device_pointer("workspace", args.workspace.data(), 256, device_.index());
  }
  Status multiply_rows(const Router::Args& args, const float* weight) const {
    cuda::ZeroExpertRowsParams p;
    p.weight = weight;
    p.padding = args.padding_mask.as<std::uint8_t>();
    p.x = args.hidden_states.data;
    p.x_dtype = args.hidden_states.dtype;
    p.tokens = args.hidden_states.dim(0);
    p.hidden = args.hidden_states.dim(1);
    p.output = args.zero_expert_output.data;
    p.output_dtype = args.zero_expert_output.dtype;
    const cuda::DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    return cuda::check_call("zero experts", cuda::launch_zero_expert_rows(p, args.stream.handle));
  }

  Device device_;
  std::unique_ptr<cuda::CudaRouter> router_;
};

}  // namespace

Result<std::unique_ptr<DeviceRouter>> make_device_router(const Router::Options& options) {
  MOESAIC_RETURN_IF_ERROR(check_device(options.device));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<cuda::CudaRouter> router,
                           cuda::CudaRouter::create(options, options.device.index()));
  std::unique_ptr<DeviceRouter> made(new (std::nothrow)
                                         Sm90Router(options.device, std::move(router)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the router");
  return made;
}

}  // namespace moesaic::router
