// Descriptions of quantisation as config.json has them, for tests that read them.
#pragma once

#include <nlohmann/json.hpp>

#include "checkpoint/config/quant_config.h"
#include "moesaic/status.h"

namespace moesaic::test {

using Json = nlohmann::json;

inline Result<checkpoint::QuantConfig> parse_quant(const Json& quant) {
  return checkpoint::parse_quant_config(Json({{"quantization_config", quant}}));
}

inline Json group(const Json& targets, int bits, const Json& more = Json::object()) {
  Json made = {{"targets", targets},
               {"weights",
                {{"num_bits", bits}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}}}};
  made.update(more);
  return made;
}

inline Json compressed(const Json& groups, const Json& ignore) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"config_groups", groups},
          {"ignore", ignore}};
}

}  // namespace moesaic::test
