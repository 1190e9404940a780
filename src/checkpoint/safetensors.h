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

#include "checkpoint/mapped_file.h"
#include "moesaic/checkpoint.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference reader's cap
inline constexpr int kMaxHeaderDepth = 8;
// Far above what exists.
inline constexpr int kMaxMetadataEntries = 1 << 16;

// One validated tensor: begin <= end <= data bytes and end - begin is exactly the size that dtype
// and shape say.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  int rank = 0;             // as in the file
  Shape shape;              // rank 0 when rank > kMaxRank: such a tensor is listed but not readable
  std::uint64_t begin = 0;  // bytes, relative to the data section
  std::uint64_t end = 0;
  std::uint64_t bytes() const { return end - begin; }
};

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

// Both of the above on a complete file in memory (tests, fuzzing).
Result<SafetensorsHeader> parse_safetensors(std::string_view label,
                                            std::span<const std::byte> file);

// An open file with its header. Movable; TensorInfo pointers stay valid. Reads are thread-safe.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path, FileAccess access);

  const std::string& path() const { return file_.path(); }
  std::span<const TensorInfo> tensors() const { return header_.tensors(); }
  const TensorInfo* find(std::string_view name) const { return header_.find(name); }
  const SafetensorsHeader& header() const { return header_; }

  // All of the following take an `info` of this file. They copy by explicit reads under either
  // FileAccess, so a file that shrinks meanwhile gives kIo. kLimitExceeded for rank > kMaxRank.

  // The whole tensor; dst.size() must be info.bytes(), else kInvalidArgument.
  Status read(const TensorInfo& info, std::span<std::byte> dst) const;
  // dst.size() bytes from byte `offset` of the tensor; kInvalidArgument beyond its end.
  Status read_range(const TensorInfo& info, std::uint64_t offset, std::span<std::byte> dst) const;
  // A rectangle of the tensor seen as a matrix [product of all leading dimensions, last dimension]
  // (rank 0 and 1: one row): rows [first_row, +num_rows), columns [first_col, +num_cols), written
  // row-major without gaps. So expert e of [E, R, C] is rows [e * R, +R), a tensor-parallel slice
  // of w2 [H, I] a range of columns. kInvalidArgument: outside the tensor or dst.size() is not
  // num_rows * num_cols elements; kInvalidLayout: a sub-byte type whose columns do not fall on
  // bytes.
  Status read_rows(const TensorInfo& info, std::int64_t first_row, std::int64_t num_rows,
                   std::int64_t first_col, std::int64_t num_cols, std::span<std::byte> dst) const;
  // A new tensor with the contents.
  Result<Tensor> read_tensor(const TensorInfo& info) const;

  // Zero-copy bytes, not necessarily aligned; FileAccess::kMmap only (else kUnsupported). The
  // caller accepts SIGBUS when somebody cuts the file meanwhile. Valid while this object lives.
  Result<std::span<const std::byte>> view(const TensorInfo& info) const;
  // After using a large view: takes its pages out of this process's resident memory.
  void drop_residency(const TensorInfo& info) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

}  // namespace moesaic
