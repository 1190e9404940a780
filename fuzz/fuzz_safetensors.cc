// Any bytes as a safetensors file, and as the header text of one: an error, or tensors that tile
// the data exactly.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "checkpoint/container/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const moesaic::Result<moesaic::checkpoint::SafetensorsHeader>& header,
           std::uint64_t file_bytes) {
  if (!header.ok()) {
    const auto code = header.status().code();
    // Unsupported: a file of another format, known by its first bytes.
    require(code == moesaic::StatusCode::kCorruptFile ||
            code == moesaic::StatusCode::kLimitExceeded ||
            code == moesaic::StatusCode::kUnsupported);
    require(header.status().message().size() < 2000);
    return;
  }
  std::uint64_t end = 0;
  for (const moesaic::checkpoint::TensorInfo& t : header->tensors()) {
    require(t.begin == end && t.end >= t.begin);
    end = t.end;
    require(!t.name.empty() && header->find(t.name) == &t);
    if (t.rank <= moesaic::kMaxRank) {
      const auto bytes = moesaic::contiguous_bytes(t.dtype, t.shape);
      // Shape counts in 63 bits, the format in 64: only zero-sized shapes may differ.
      require(bytes.ok() ? static_cast<std::uint64_t>(*bytes) == t.bytes() : t.bytes() == 0);
    }
  }
  require(header->data_offset() + end == file_bytes);
}

moesaic::Result<moesaic::checkpoint::SafetensorsHeader> parse_file(
    std::span<const std::byte> file) {
  MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t n,
                           moesaic::checkpoint::safetensors_header_bytes("f", file, file.size()));
  const auto* text = reinterpret_cast<const char*>(file.data()) + 8;
  return moesaic::checkpoint::parse_safetensors_header("f", {text, static_cast<std::size_t>(n)},
                                                       file.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  check(parse_file(file), size);
  // Without the length field nearly every mutation reaches the parser.
  constexpr std::uint64_t kDataBytes = 16;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::uint64_t file_bytes = 8 + size + kDataBytes;
  check(moesaic::checkpoint::parse_safetensors_header("f", text, file_bytes), file_bytes);
  return 0;
}
