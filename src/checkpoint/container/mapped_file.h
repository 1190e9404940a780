// One regular file opened for reading: positioned reads and, on request, a read-only mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Movable, closes the file when destroyed. Thread-safe for concurrent reads.
class MappedFile {
 public:
  MappedFile() = default;
  // kNotFound when there is no such file, kIo for everything else the system refuses, among it
  // anything that is not a regular file (folders, pipes, devices). kMmap maps the file at once.
  static Result<MappedFile> open(const std::string& path, FileAccess access);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }  // when it was opened

  // Fills `dst` from byte `offset` by explicit reads, never through the mapping: a file that shrank
  // since it was opened gives kIo, not a signal. kInvalidArgument beyond size().
  Status read_at(std::uint64_t offset, std::span<std::byte> dst) const;

  // The whole mapped file; empty without a mapping (FileAccess::kCopy, empty file). Reading a page
  // that was cut off the file by somebody else raises SIGBUS: only for callers who accept that.
  std::span<const std::byte> mapping() const { return {map_, map_ == nullptr ? 0 : size_}; }
  // Gives the pages of a byte range of the mapping back to the system's cache (they are read again
  // when touched). No effect without a mapping.
  void drop_residency(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  void close() noexcept;
  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  std::byte* map_ = nullptr;
};

// A whole small text file (config.json, the index). kLimitExceeded when larger than max_bytes,
// before anything is allocated.
Result<std::string> read_text_file(const std::string& path, std::size_t max_bytes);

}  // namespace moesaic::checkpoint
