// Whether a device can be used; the same with and without CUDA.
#include <fmt/format.h>

#include "moesaic/device.h"

namespace moesaic {

Status check_device(Device device) {
  if (!device.is_cuda()) return {};
  const CudaInfo info = query_cuda();
  if (!info.built) {
    return {StatusCode::kUnsupported, fmt::format("{}: {}", device.to_string(), info.reason)};
  }
  for (const CudaDeviceInfo& d : info.devices) {
    if (d.index != device.index()) continue;
    if (d.available) return {};
    return {StatusCode::kDevice, fmt::format("{}: {}", device.to_string(), d.reason)};
  }
  // Without any device the reason (no driver, none visible) says more than a count of zero.
  if (info.devices.empty()) {
    return {StatusCode::kDevice, fmt::format("{}: {}", device.to_string(), info.reason)};
  }
  return {StatusCode::kNotFound, fmt::format("device: got {}, need an index below {}",
                                             device.to_string(), info.devices.size())};
}

}  // namespace moesaic
