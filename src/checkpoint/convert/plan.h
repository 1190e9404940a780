// What a converted checkpoint will consist of, decided from names, shapes and the configuration
// before anything is written.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/families.h"
#include "checkpoint/container/safetensors_layout.h"
#include "checkpoint/container/shards.h"
#include "checkpoint/convert/config.h"
#include "checkpoint/convert/format.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// The routed experts of one layer.
struct PlannedLayer {
  MoeLayerSpec spec;
  // Module names of one expert with "{e}", full. Not gated: `gate` is empty. gpt-oss's own layout:
  // `gate` is gate_up, `up` is empty, no "{e}".
  std::string gate, up, down;
  bool own_mxfp4 = false;
  bool gated = true;
  std::int64_t bytes_in = 0, bytes_out = 0;
};

// One file of the result.
struct PlannedShard {
  std::string file;
  std::vector<TensorSpec> tensors;
  std::vector<ShardSet::Located> copies;  // the files of tensors that are no routed expert's
  int layer = -1;                         // index into layers of the files of experts
};

struct ConvertPlan {
  ConvertFormat format = ConvertFormat::kFp8Block;
  std::vector<PlannedLayer> layers;
  std::vector<PlannedShard> shards;
  nlohmann::ordered_json quantization;  // quantization_config of the result
  std::vector<std::string> notes;
};

// kUnsupported, kAmbiguousFormat: see convert_checkpoint.
Result<ConvertPlan> plan_conversion(const Checkpoint& checkpoint, const ShardSet& shards,
                                    const SourceQuantization& source, ConvertFormat format);

// "mlp.experts.{e}.gate_proj" for expert 3, and the file names "model-00002-of-00005.safetensors".
std::string module_of_expert(const std::string& pattern, std::int64_t expert);

}  // namespace moesaic::checkpoint
