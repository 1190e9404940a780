// Strict reader of one safetensors file. The header is parsed once into an immutable, validated
// index; nothing here interprets tensor values. Layout: u64 little-endian N, N bytes of JSON, data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/container/tensor_data_file.h"
#include "moesaic/checkpoint.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference reader's cap
inline constexpr int kMaxHeaderDepth = 8;
// Far above what exists.
inline constexpr int kMaxMetadataEntries = 1 << 16;

// The parsed header. Pointers and views stay valid when it is moved.
class SafetensorsHeader {
 public:
  // In the order of the data section; tensors without bytes in the order of the header.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  // O(log n); nullptr when absent. Exact bytes.
  const TensorInfo* find(std::string_view name) const;
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  std::uint64_t data_offset() const { return data_offset_; }  // 8 + N

 private:
  friend class HeaderBuilder;
  struct NameKey {
    std::uint64_t hash;
    std::uint32_t index;
  };
  std::vector<TensorInfo> tensors_;
  std::vector<NameKey> by_name_;  // sorted by (hash, name)
  std::map<std::string, std::string, std::less<>> metadata_;
  std::uint64_t data_offset_ = 0;
};

// Checks the first 8 bytes against the file's size; returns N. `label` (the file name) begins every
// message. kCorruptFile, kLimitExceeded (N > kMaxHeaderBytes).
Result<std::uint64_t> safetensors_header_bytes(std::string_view label,
                                               std::span<const std::byte> first_bytes,
                                               std::uint64_t file_bytes);

// Parses and validates the N bytes of JSON of a file of `file_bytes` bytes. kCorruptFile for
// anything malformed, kLimitExceeded for sizes beyond 64 bits, nesting, metadata and extra-key
// caps. Every message names the file and the tensor or field, the value found and the value needed.
// Memory: at most about 8 times header.size(). O(n log n).
Result<SafetensorsHeader> parse_safetensors_header(std::string_view label, std::string_view header,
                                                   std::uint64_t file_bytes);

// An open file with its header. Movable; TensorInfo pointers stay valid. Reads are thread-safe.
class SafetensorsFile : public TensorDataFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path, FileAccess access);

  std::span<const TensorInfo> tensors() const { return header_.tensors(); }
  const TensorInfo* find(std::string_view name) const { return header_.find(name); }
  const SafetensorsHeader& header() const { return header_; }

 private:
  SafetensorsFile(MappedFile file, SafetensorsHeader header);
  SafetensorsHeader header_;
};

}  // namespace moesaic::checkpoint
