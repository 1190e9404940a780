// A build without CUDA: a Router on a GPU refuses.
#include "router/device_router.h"

namespace moesaic::router {

Result<std::unique_ptr<DeviceRouter>> make_device_router(const Router::Options& options) {
  return check_device(options.device);
}

}  // namespace moesaic::router
