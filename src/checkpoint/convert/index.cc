#include "checkpoint/convert/index.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/container/json_strict.h"
#include "core/fault.h"

namespace moesaic::checkpoint {

Result<std::string> converted_index(std::span<const PlannedShard> shards, std::size_t max_bytes) {
  using Json = nlohmann::ordered_json;
  Json map = Json::object();
  std::int64_t total = 0;
  std::size_t tensors = 0;
  for (const PlannedShard& shard : shards) {
    for (const TensorSpec& t : shard.tensors) {
      append_member(&map, t.name, shard.file);
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(t.dtype, t.shape));
      total += bytes;
    }
    tensors += shard.tensors.size();
  }
  std::string text =
      Json({{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}}).dump(2) + "\n";
  if (text.size() > max_bytes && !MOESAIC_FAULT(convert_writes_any_index)) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("convert: model.safetensors.index.json of the result would have {} "
                              "bytes for {} tensors, and at most {} are read: need a checkpoint "
                              "with fewer tensors or shorter names",
                              text.size(), tensors, max_bytes));
  }
  return text;
}

}  // namespace moesaic::checkpoint
