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

Result<std::unique_ptr<LayerEngine>> LayerEngine::in_world(const FusedPlan&,
                                                           const FusedMoE::Options& options,
                                                           const RankMesh*, ExpertSource&) const {
  return Status(
      unsupported(fmt::format("update_expert_map: got a layer on {}, need one on the CPU, or a new "
                              "layer of the new world",
                              options.device.to_string())));
}

Status LayerEngine::forward_pair(const FusedMoE::Args& first, const FusedMoE::Args& second) const {
  MOESAIC_RETURN_IF_ERROR(forward_host(first));
  return forward_host(second);
}

Status LayerEngine::sum_over_replicas(Stream, const TensorView& x) const {
  return unsupported(fmt::format("x: got memory of {}, need the CPU's", x.device.to_string()));
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
