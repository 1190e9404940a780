// Writes one safetensors file whose tensors come in any order and in pieces, so that nothing larger
// than a piece is ever in memory. For files inside a folder that becomes visible as a whole; a
// single file that must appear at once: write_safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/container/safetensors_layout.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

class SafetensorsStream {
 public:
  // Creates the file (it must not exist) with its full size and its header. Errors of
  // layout_safetensors, kIo.
  static Result<SafetensorsStream> create(
      const std::string& path, std::span<const TensorSpec> tensors,
      std::span<const std::pair<std::string, std::string>> metadata = {});
  SafetensorsStream(SafetensorsStream&& other) noexcept;
  SafetensorsStream& operator=(SafetensorsStream&& other) noexcept;
  SafetensorsStream(const SafetensorsStream&) = delete;
  SafetensorsStream& operator=(const SafetensorsStream&) = delete;
  ~SafetensorsStream();

  // Bytes of tensor `name` from byte `offset` of it on. kNotFound for a name that was not
  // announced, kInvalidArgument beyond its end, kIo.
  Status write(std::string_view name, std::uint64_t offset, std::span<const std::byte> bytes);
  // A whole contiguous tensor of the announced dtype and shape (kInvalidDType, kInvalidShape).
  Status write(std::string_view name, const ConstTensorView& tensor);

  // Flushes and closes. kInternal when a tensor did not get exactly its bytes: each is written
  // once.
  Status finish();

 private:
  struct Entry {
    TensorSpec spec;
    std::uint64_t begin = 0, bytes = 0, written = 0;
  };
  SafetensorsStream() = default;
  Status system_error(std::string_view what, int error) const;
  Status write_all(std::uint64_t offset, std::span<const std::byte> bytes);

  std::string path_;
  int fd_ = -1;
  std::uint64_t data_offset_ = 0;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace moesaic::checkpoint
