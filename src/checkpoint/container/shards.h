// The files of one model, a folder of safetensors or one GGUF model, or tensors that a program hands
// over, as one set of named tensors.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/container/gguf.h"
#include "checkpoint/container/pushed_tensors.h"
#include "checkpoint/container/safetensors.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline constexpr std::string_view kSafetensorsExtension = ".safetensors";

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
    const TensorDataFile* file;
    const TensorInfo* info;
  };

  // Reads headers only. kNotFound: no folder, no safetensors in it, or a listed file is absent.
  // kMissingTensor: mapped, but not in its file. kCorruptFile: malformed index or file, a shard
  // name that is not a plain file name, a name in two shards without an index. kLimitExceeded, kIo.
  static Result<ShardSet> open(const std::string& directory, FileAccess access);
  // One GGUF file, or all parts of a split one, given its first part
  // ("<name>-00001-of-00003.gguf"). The parts' metadata must match their names: kCorruptFile
  // names split.no, split.count or split.tensors.count, kNotFound a part that is not there,
  // kInvalidArgument a part other than the first.
  static Result<ShardSet> open_gguf(const std::string& path, FileAccess access);
  // The tensors that were handed over so far. What is forgotten later must not be asked for.
  static ShardSet of(std::shared_ptr<const PushedTensors> tensors);
  // Headers of the GGUF files, first part first; empty for safetensors.
  std::span<const GgufHeader* const> gguf_headers() const { return gguf_headers_; }

  // O(log n).
  std::optional<Located> find(std::string_view name) const;
  // Sorted by name (bytes).
  std::span<const Located> tensors() const { return tensors_; }
  std::uint64_t total_bytes() const { return total_bytes_; }  // of all tensors in the set
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  Status open_indexed(const std::string& directory, const std::string& index_path,
                      const ShardIndex& index, FileAccess access);
  Status open_unindexed(const std::string& directory, FileAccess access);
  void warn_ignored(const SafetensorsFile& file);
  // Sorts tensors_ by name; kCorruptFile for a name in two files.
  Status sort_unindexed(const std::string& label);
  Status sum_bytes(const std::string& label);

  std::vector<std::shared_ptr<const TensorDataFile>> files_;
  std::vector<const GgufHeader*> gguf_headers_;  // of files_
  std::vector<Located> tensors_;
  std::uint64_t total_bytes_ = 0;
  std::vector<std::string> warnings_;
};

}  // namespace moesaic::checkpoint
