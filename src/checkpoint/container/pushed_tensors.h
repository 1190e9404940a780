// Tensors that a program hands over one by one, as a container like a file: the headers of all, and of
// their bytes what somebody will read. What names, shapes and slices mean is for others to say
// (binding, reader/held_parts.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/container/tensor_data_file.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// `count` runs of `bytes` bytes of a tensor, `pitch` apart, the first at byte `first`.
struct ByteRuns {
  std::int64_t first = 0, bytes = 0, pitch = 0, count = 0;
  bool operator==(const ByteRuns&) const = default;
};
inline ByteRuns whole_tensor(const TensorInfo& info) {
  const auto bytes = static_cast<std::int64_t>(info.bytes());
  return {0, bytes, bytes, 1};
}

// Reads are thread-safe, changes are not. Infos stay valid until they are forgotten.
class PushedTensors final : public TensorDataFile {
 public:
  explicit PushedTensors(std::string label) : label_(std::move(label)) {}
  const std::string& path() const override { return label_; }

  // A header, of which no byte is kept yet. kInvalidArgument when the name is empty or there
  // already; kLimitExceeded, kInvalidShape as contiguous_bytes.
  Result<const TensorInfo*> add(std::string_view name, DType dtype, const Shape& shape,
                                quant::GgufType block_type);
  // Copies these runs out of the whole tensor's bytes; what was kept before goes, which those bytes
  // may be. kOutOfMemory, and kInternal for a run that is no part of the tensor: then it stays.
  Status keep(const TensorInfo& info, std::span<const ByteRuns> runs, const std::byte* tensor);
  // Of a tensor that is kept whole, these runs alone; the whole stays where that fails.
  Status cut(const TensorInfo& info, std::span<const ByteRuns> runs);
  void forget(const TensorInfo& info);

  const TensorInfo* find(std::string_view name) const;
  bool keeps_whole(const TensorInfo& info) const;
  // Sorted by name (bytes).
  std::vector<const TensorInfo*> tensors() const;
  std::int64_t kept_bytes() const { return kept_bytes_; }

  // Of what was kept; kInternal for other bytes.
  Status read_range(const TensorInfo& info, std::uint64_t offset,
                    std::span<std::byte> dst) const override;

 private:
  struct Piece {
    ByteRuns runs;
    Tensor bytes;
  };
  struct Entry {
    TensorInfo info;
    std::vector<Piece> pieces;
  };
  bool reads_whole_rows() const override { return false; }
  void drop(Entry* entry);

  std::string label_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::unordered_map<const TensorInfo*, Entry*> by_info_;
  std::int64_t kept_bytes_ = 0;
};

}  // namespace moesaic::checkpoint
