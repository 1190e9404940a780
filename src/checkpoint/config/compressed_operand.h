// One side of a config group of compressed-tensors. Source: docs/spec/checkpoints.md section 4.1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/config_fields.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// "weights" or "input_activations".
struct CompressedOperand {
  std::int64_t bits = 0;
  std::string type, strategy;
  bool symmetric = true;
  bool dynamic = false;
  std::int64_t group_size = 0;
  std::vector<std::int64_t> block;
  std::string act_order;
};

// Nothing where the group has none. kUnsupported, kCorruptFile by field.
Result<std::optional<CompressedOperand>> read_compressed_operand(const ConfigFields& group,
                                                                 std::string_view name);

}  // namespace moesaic::checkpoint
