// Names of devices. Which of them can be used: cuda/check_device.cc.
#include "moesaic/device.h"

#include <fmt/format.h>

#include <charconv>

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

}  // namespace moesaic
