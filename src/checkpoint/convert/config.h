// quantization_config of a converted checkpoint: one description of the experts' new format and of
// the linears that keep the format they had. Nothing here touches tensors.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/quant_config.h"
#include "checkpoint/convert/format.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// How the source describes its quantisation, in config.json or in a file beside it.
struct SourceQuantization {
  // As in quantization_config, with quant_method; null: no description.
  nlohmann::ordered_json json;
  QuantConfig parsed;
};
// `config` is the text of the folder's config.json, which the checkpoint was opened with. For a
// model that convert wrote this is the description of what is not its routed experts.
Result<SourceQuantization> read_source_quantization(const std::string& directory,
                                                    std::string_view config);

// What the result consists of.
struct ConvertedModules {
  ConvertFormat format = ConvertFormat::kFp8Block;
  bool own_mxfp4 = false;
  struct Experts {
    int layer = -1;
    std::string module;  // "model.layers.3.mlp.experts"
    bool plain = false;  // the source's description leaves them out
  };
  std::vector<Experts> experts;
  std::vector<std::string> plain;      // linears that are copied and not quantised
  std::vector<std::string> quantized;  // linears that are copied in the source's format
  bool kv_scales = false;              // scales of a quantised cache are copied
};

struct ConvertedQuantization {
  nlohmann::ordered_json json;  // the result's quantization_config
  // The experts' format in the form that goes with it: one of fp8-block's three, or as it was.
  ConvertFormat format = ConvertFormat::kFp8Block;
  std::vector<std::string> notes;
};
// The smallest description that is true of both: that of the experts alone where nothing else is
// quantised; the source's own where both are FP8 blocks; groups of compressed-tensors where both
// are; else two parts (quant_config.h), with a note that other engines do not read it.
// kAmbiguousFormat when linears are quantised and the source does not say how.
Result<ConvertedQuantization> describe_conversion(const SourceQuantization& source,
                                                  const ConvertedModules& modules);

// The whole config.json with that description in place of the source's. kLimitExceeded when it would
// be too large to be read.
Result<std::string> converted_config(std::string_view config,
                                     const nlohmann::ordered_json& quantization);

}  // namespace moesaic::checkpoint
