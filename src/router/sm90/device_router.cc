// CudaRouter as a Router: views and a stream in, launches out.
#include "router/device_router.h"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "router/sm90/router.h"

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
    const auto check = [&](std::string_view field, const ConstTensorView& t) {
      return t.present() ? cuda::check_device_pointer(field, t.data, 4, device_.index()) : Status();
    };
    MOESAIC_RETURN_IF_ERROR(check("router_logits", args.router_logits));
    MOESAIC_RETURN_IF_ERROR(check("topk_weights", args.topk_weights));
    MOESAIC_RETURN_IF_ERROR(check("topk_ids", args.topk_ids));
    MOESAIC_RETURN_IF_ERROR(check("input_ids", args.input_ids));
    if (args.padding_mask.present()) {
      MOESAIC_RETURN_IF_ERROR(
          cuda::check_device_pointer("padding_mask", args.padding_mask.data, 1, device_.index()));
    }
    a.router_logits = args.router_logits.as<float>();
    a.input_ids = args.input_ids.as<std::int32_t>();
    a.padding_mask = args.padding_mask.as<std::uint8_t>();
    a.topk_weights = args.topk_weights.as<float>();
    a.topk_ids = args.topk_ids.as<std::int32_t>();
    return router_->enqueue(args.stream.handle, a);
  }
  std::int64_t slots() const override { return router_->slots(); }
  const RoutingSpec& spec() const override { return router_->spec(); }
  std::string name() const override { return router_->name(); }

 private:
  Device device_;
  std::unique_ptr<cuda::CudaRouter> router_;
};

}  // namespace

Result<std::unique_ptr<DeviceRouter>> make_device_router(const Router::Options& options) {
  if (options.spec.num_zero_experts > 0) {
    return unsupported(fmt::format("routing.num_zero_experts: got {} on a GPU, need 0 or the CPU",
                                   options.spec.num_zero_experts));
  }
  MOESAIC_RETURN_IF_ERROR(check_device(options.device));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<cuda::CudaRouter> router,
                           cuda::CudaRouter::create(options, options.device.index()));
  std::unique_ptr<DeviceRouter> made(new (std::nothrow)
                                         Sm90Router(options.device, std::move(router)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the router");
  return made;
}

}  // namespace moesaic::router
