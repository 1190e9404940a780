// Walks the bytes of a GGUF header in order. Every length is checked against what is left before
// anything is allocated or skipped. The container's rules are in gguf.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/container/mapped_file.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Where the bytes come from: a file, or memory (tests, fuzzing).
class GgufBytes {
 public:
  explicit GgufBytes(const MappedFile& file) : file_(&file) {}
  explicit GgufBytes(std::span<const std::byte> memory) : memory_(memory) {}
  std::uint64_t size() const { return file_ == nullptr ? memory_.size() : file_->size(); }
  Status read_at(std::uint64_t offset, std::span<std::byte> dst) const;

 private:
  const MappedFile* file_ = nullptr;
  std::span<const std::byte> memory_;
};

// Reads forward through a window, so that millions of short strings cost few system calls.
// `what` names the thing that is read, for the message when the file ends too early.
class GgufReader {
 public:
  // `limit`: bytes from the start that may be walked at most.
  GgufReader(const GgufBytes& bytes, std::string_view label, std::uint64_t limit);

  std::uint64_t position() const { return position_; }
  std::uint64_t left() const { return bytes_.size() - position_; }

  Result<std::uint8_t> u8(std::string_view what) { return number<std::uint8_t>(what); }
  Result<std::uint16_t> u16(std::string_view what) { return number<std::uint16_t>(what); }
  Result<std::uint32_t> u32(std::string_view what) { return number<std::uint32_t>(what); }
  Result<std::uint64_t> u64(std::string_view what) { return number<std::uint64_t>(what); }
  // u64 length and bytes; kLimitExceeded above max_bytes, before anything is allocated.
  Result<std::string> string(std::string_view what, std::uint64_t max_bytes);
  // The same without keeping the bytes.
  Status skip_string(std::string_view what);
  Status skip(std::uint64_t bytes, std::string_view what);

 private:
  template <class T>
  Result<T> number(std::string_view what);
  // The next n <= kWindow bytes, which are consumed.
  Result<const std::byte*> take(std::size_t n, std::string_view what);
  Status need(std::uint64_t bytes, std::string_view what) const;

  static constexpr std::size_t kWindow = 1 << 16;
  GgufBytes bytes_;
  std::string_view label_;
  std::uint64_t limit_;
  std::uint64_t position_ = 0;
  std::vector<std::byte> window_;
  std::uint64_t window_begin_ = 0;
};

}  // namespace moesaic::checkpoint
