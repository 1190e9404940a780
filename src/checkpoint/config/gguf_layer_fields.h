// What the metadata of a GGUF file state layer by layer, as fields of a config.json of its family.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/config/families.h"
#include "checkpoint/config/gguf_architectures.h"
#include "checkpoint/config/gguf_metadata.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Limits of the activation, and which layers route by token id.
class GgufLayerFields {
 public:
  static Result<GgufLayerFields> read(const GgufMetadata& metadata,
                                      const GgufArchitecture& architecture, const Family& family,
                                      std::int64_t num_blocks);
  // Numbers that are equal for layers that are.
  std::vector<double> of(int layer) const;
  Status add(const GgufMetadata& metadata, int layer, nlohmann::json* json) const;

 private:
  explicit GgufLayerFields(const Family& family) : family_(&family) {}

  const Family* family_;
  bool states_limits_ = false;
  // Limits of every block; empty: the file states none.
  std::vector<double> limits_, shared_limits_;
  std::int64_t hash_layers_ = 0;
  std::int64_t vocabulary_ = 0;
};

}  // namespace moesaic::checkpoint
