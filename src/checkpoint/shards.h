// The safetensors files of one model folder as one set of named tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic {

// The parsed model.safetensors.index.json: (tensor, file) pairs sorted by tensor, no duplicates,
// plain file names.
struct ShardIndex {
  std::vector<std::pair<std::string, std::string>> weight_map;
  std::optional<std::uint64_t> total_size;  // absent when missing or not an exact integer
};
inline constexpr std::size_t kMaxIndexBytes = 100'000'000;
Result<ShardIndex> parse_shard_index(std::string_view label, std::string_view json);

// With model.safetensors.index.json only the files it lists are read, each mapped tensor must be in
// its file, and a tensor found elsewhere is ignored with a warning. Without an index:
// model.safetensors and every model-NNNNN-of-NNNNN.safetensors, all numbers present, no name twice.
// Movable; Located pointers stay valid.
class ShardSet {
 public:
  struct Located {
    const SafetensorsFile* file;
    const TensorInfo* info;
  };

  // Reads headers only. kNotFound: no folder, no safetensors in it, or a listed file is absent.
  // kMissingTensor: mapped, but not in its file. kCorruptFile: malformed index or file, a shard
  // name that is not a plain file name, a name in two shards without an index. kLimitExceeded, kIo.
  static Result<ShardSet> open(const std::string& directory, FileAccess access);

  // O(log n).
  std::optional<Located> find(std::string_view name) const;
  // Sorted by name (bytes).
  std::span<const Located> tensors() const { return tensors_; }
  std::uint64_t total_bytes() const { return total_bytes_; }  // of all tensors in the set
  const std::vector<std::string>& warnings() const { return warnings_; }
  std::span<const std::unique_ptr<SafetensorsFile>> files() const { return files_; }

 private:
  Status open_indexed(const std::string& directory, const std::string& index_path,
                      const ShardIndex& index, FileAccess access);
  Status open_unindexed(const std::string& directory, FileAccess access);
  void warn_ignored(const SafetensorsFile& file);

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<Located> tensors_;
  std::uint64_t total_bytes_ = 0;
  std::vector<std::string> warnings_;
};

}  // namespace moesaic
