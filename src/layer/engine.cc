// The catalogue of engines, and what they have in common.
#include "layer/engine.h"

#include <fmt/format.h>

#include <array>

#include "core/refusal.h"
#include "layer/cpu/engine.h"
#include "layer/sm90/layer.h"

namespace moesaic::layer {
namespace {

constexpr auto kEngines = std::to_array<LayerEngineRow>({cuda::kSm90Engine, kCpuEngine});

}  // namespace

std::span<const LayerEngineRow> layer_engines() { return kEngines; }

const LayerEngineRow& engine_of(Device device) {
  for (const LayerEngineRow& row : kEngines) {
    if (row.serves(device)) return row;
  }
  return kEngines.back();  // a device is a GPU or the CPU
}

Result<bool> LayerEngine::continue_rearrange(std::int64_t) {
  return Status(StatusCode::kInternal, "an engine that moves no experts was asked to");
}

std::string layer_determinism(std::string_view routed, std::string_view routed_determinism,
                              std::string_view shared, std::string_view shared_determinism) {
  std::string text = fmt::format(
      "bit-identical for any batch, split, row order and thread count; experts ({}): {}", routed,
      routed_determinism);
  if (!shared.empty()) {
    text += fmt::format("; shared experts ({}): {}", shared, shared_determinism);
  }
  return text;
}

Status on_other_device(const Status& own, Device device, std::string_view need) {
  if (!own.ok()) return own;
  return unsupported(fmt::format("device: {}, need {}", device.to_string(), need));
}

}  // namespace moesaic::layer
