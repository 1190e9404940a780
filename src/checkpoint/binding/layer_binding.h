// Finds a layer's tensors in a set of files and checks all of them before anything is read:
// present, counted per expert, exact shape, exact dtype, nothing unknown beside them. Source:
// docs/spec/checkpoints.md sections 3.1, 4.3 and 6.5.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/binding/layer_plan.h"
#include "checkpoint/config/config.h"
#include "checkpoint/container/shards.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// The tensors of the three linears of one MLP, by Projection. Fused files have no kUp.
class MlpTensors {
 public:
  using PerProjection = std::array<std::optional<ShardSet::Located>, 3>;
  PerProjection& of(TensorKind kind) { return kinds_[static_cast<std::size_t>(kind)]; }
  const PerProjection& of(TensorKind kind) const { return kinds_[static_cast<std::size_t>(kind)]; }
  // Bytes of all tensors, as stored.
  std::int64_t bytes() const;

 private:
  std::array<PerProjection, kNumTensorKinds> kinds_;
};

struct BoundLayer {
  LayerSource source;
  std::optional<ShardSet::Located> gate_weight, gate_bias, correction_bias, shared_gate;
  std::optional<ShardSet::Located> hash_table, router_scale, experts_norm, expert_scale;
  MlpTensors shared;
  std::vector<MlpTensors> experts;  // [E], or [1] when stacked
};

// Settles what the configuration leaves to the files: the names' prefix, the layout of the experts,
// the spelling of optional tensors, dtypes, and which parts the quantisation skips.
// kAmbiguousFormat when the files hold two layouts at once, kInvalidDType for an expert dtype that
// contradicts the configuration, kUnsupported for a partly quantised set of experts.
Result<LayerSource> resolve_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                                  const ShardSet& shards);

// Whether a tensor of the plan has to be there. Null: all that are not optional.
using TensorNeeded = std::function<bool(const LayerSource& source, const PlannedTensor& tensor)>;

// kMissingTensor names up to 8 tensors and the incomplete experts; kInvalidShape, kInvalidDType
// name the tensor, found and needed. kUnsupported names unrecognised tensors inside the block, also
// where they stand in place of all weights of the experts; kCorruptFile where they contradict the
// configuration (an expert too many). O(n log n) in the layer's tensors.
Result<BoundLayer> bind_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                              const ShardSet& shards, const TensorNeeded& needed = {});

// Names of the plan's tensors that are needed and not there, in the plan's order.
std::vector<std::string> missing_names(const LayerSource& source, const ShardSet& shards,
                                       const TensorNeeded& needed);

// Has the tensor the dtype and one of the shapes that the plan wants? kInvalidDType, kInvalidShape
// name it, found and needed.
Status check_form(const PlannedTensor& want, const TensorInfo& got);

// kCorruptFile when the files hold experts that the configuration says there are none of.
Status check_no_experts(const ModelConfig& config, const ShardSet& shards);

// Layers that the configuration calls dense although the files hold experts of theirs, ascending.
std::vector<int> dense_layers_with_experts(const ModelConfig& config, const ShardSet& shards);

// Does the name lie inside the layer's block, where everything must be known?
bool in_block(const LayerSource& source, std::string_view name);

// Tensors whose names begin with `prefix`, sorted by name.
std::span<const ShardSet::Located> tensors_under(const ShardSet& shards, std::string_view prefix);

// Bytes of all tensors of a block ("model.layers.3.mlp") as stored, whatever they are.
std::int64_t stored_block_bytes(const std::string& block, const ShardSet& shards);

}  // namespace moesaic::checkpoint
