// The part of device.h that is the same with and without CUDA.
#include <fmt/format.h>

#include <charconv>

#include "moesaic/device.h"

namespace moesaic {

std::string Device::to_string() const {
  return is_cuda() ? fmt::format("cuda:{}", index()) : std::string("cpu");
}

Result<Device> parse_device(const std::string& text) {
  if (text == "cpu") return Device::cpu();
  if (text == "cuda") return Device::cuda(0);
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix)) {
    int index = -1;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kPrefix.size(), end, index);
    if (error == std::errc() && stop == end && index >= 0) return Device::cuda(index);
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("device: got \"{}\", need cpu, cuda or cuda:N", text));
}

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
