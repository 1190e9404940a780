// config.json -> the MoE layers of a model. Pure: no files, and the entry of the fuzz target.
// Source: docs/spec/checkpoints.md sections 2 to 4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/families.h"
#include "checkpoint/config/quant_config.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Caps on what a configuration may ask for, far above every model that exists. They bound the
// memory that a few bytes of text can demand.
inline constexpr std::size_t kMaxConfigBytes = 32'000'000;
inline constexpr int kMaxConfigDepth = 32;
inline constexpr std::int64_t kMaxLayers = 4096;
inline constexpr std::int64_t kMaxExperts = 16384;
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 31;  // H and I

struct ModelConfig {
  std::string model_type;          // of the language model (inside text_config, when nested)
  const Family* family = nullptr;  // static storage
  std::int64_t num_hidden_layers = 0;
  std::optional<DType> stated_dtype;  // dtype or torch_dtype
  // The configuration does not state whether there is a selection bias (BiasRule::kStated);
  // the specs then say true until the tensor names are known.
  bool bias_by_presence = false;
  QuantConfig quant;
  // How the configuration says that there are no experts ("num_experts: got 0"); empty: it does not.
  std::string no_experts;
  bool gguf = false;  // names and types are those of a GGUF file
  // One per MoE layer, ascending; empty for a dense model. Every spec passes validate(). `prefix`
  // and `quant` are what the family and the configuration suggest; the tensors' names and dtypes
  // have the last word (resolve_layer).
  std::vector<MoeLayerSpec> layers;
};

// kCorruptFile: not JSON, duplicate key, wrong type, missing field. kInvalidArgument: a value
// outside its range (top_k > E ...). kLimitExceeded: one of the caps above. kUnsupported: a family,
// quantisation method or value that this version does not know (the nearest known name is given).
// kAmbiguousFormat: two fields that contradict each other. Messages name the field, the value found
// and the value needed.
Result<ModelConfig> parse_model_config(std::string_view json);

// kNotFound for a layer that is none of its MoE layers, with their numbers.
Status no_such_layer(const ModelConfig& config, int index);

}  // namespace moesaic::checkpoint
