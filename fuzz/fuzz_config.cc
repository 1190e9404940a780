// Any text as config.json: an error with a text, or layers that are in range and in order.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto config =
      moesaic::checkpoint::parse_model_config({reinterpret_cast<const char*>(data), size});
  if (!config.ok()) {
    if (config.status().message().empty()) std::abort();
    if (config.status().code() == moesaic::StatusCode::kInternal) std::abort();
    return 0;
  }
  if (config->family == nullptr) std::abort();
  if (static_cast<std::int64_t>(config->layers.size()) > config->num_hidden_layers) std::abort();
  int previous = -1;
  for (const moesaic::MoeLayerSpec& layer : config->layers) {
    if (layer.layer <= previous || !moesaic::validate(layer).ok()) std::abort();
    previous = layer.layer;
  }
  return 0;
}
