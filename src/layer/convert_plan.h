// What a converted checkpoint will consist of, decided from names, shapes and the configuration
// before anything is written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/families.h"
#include "checkpoint/safetensors_layout.h"
#include "checkpoint/shards.h"
#include "layer/convert_format.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic {

// A tensor that is no routed expert's.
struct CopiedTensor {
  ShardSet::Located from;
  // FP8-block weights that become BF16: their scales; else not located.
  const TensorInfo* scale = nullptr;
  const TensorDataFile* scale_file = nullptr;
};

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
  std::vector<CopiedTensor> copies;  // the files of copied tensors
  int layer = -1;                    // index into layers of the files of experts
};

struct ConvertPlan {
  ConvertFormat format = ConvertFormat::kFp8Block;
  std::vector<PlannedLayer> layers;
  std::vector<PlannedShard> shards;
  std::vector<std::string> ignored;  // linears that stay as they are, for the configuration
  bool keep_quantization_config = false;
  std::vector<std::string> notes;
};

// kUnsupported: see convert_checkpoint.
Result<ConvertPlan> plan_conversion(const Checkpoint& checkpoint, const ShardSet& shards,
                                    ConvertFormat format);

// "mlp.experts.{e}.gate_proj" for expert 3, and the file names "model-00002-of-00005.safetensors".
std::string module_of_expert(const std::string& pattern, std::int64_t expert);

}  // namespace moesaic
