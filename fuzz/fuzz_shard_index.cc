// Any text as model.safetensors.index.json: an error, or a sorted map of plain file names.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "checkpoint/container/shards.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto index =
      moesaic::checkpoint::parse_shard_index("f", {reinterpret_cast<const char*>(data), size});
  if (!index.ok()) return 0;
  const std::string* previous = nullptr;
  for (const auto& [tensor, file] : index->weight_map) {
    if (tensor.empty() || (previous != nullptr && *previous >= tensor)) std::abort();
    if (file.find_first_of(std::string("/\\:\0", 4)) != std::string::npos) std::abort();
    if (file.find("..") != std::string::npos || !file.ends_with(".safetensors")) std::abort();
    previous = &tensor;
  }
  if (index->weight_map.empty()) std::abort();
  return 0;
}
