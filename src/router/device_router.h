// A router whose tensors are on a GPU: what Router is there, behind the same calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "moesaic/router.h"
#include "moesaic/status.h"

namespace moesaic::router {

class DeviceRouter {
 public:
  virtual ~DeviceRouter() = default;
  virtual Status select_experts(const Router::Args& args) const = 0;
  virtual Result<std::int64_t> workspace_size(std::int64_t tokens) const = 0;
  virtual std::int64_t slots() const = 0;
  virtual const RoutingSpec& spec() const = 0;
  virtual std::string name() const = 0;
};

// options.device is a GPU. What it cannot do (Router::Options), then errors of check_device, which in
// a build without CUDA refuses every GPU, and those of Router::create.
Result<std::unique_ptr<DeviceRouter>> make_device_router(const Router::Options& options);

// What a call with zero experts needs: their summed weight per token.
inline std::int64_t device_router_workspace(std::int64_t tokens) { return tokens * 4; }
// Shapes, dtypes, layout, devices and aliasing of a call on `device`; needs none.
Status check_device_select_args(const Router::Args& args, const RoutingSpec& spec,
                                std::int64_t slots, Device device);

}  // namespace moesaic::router
