// The header's bytes: length, text, padding. Entries are read by HeaderBuilder.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/header_builder.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/safetensors.h"

namespace moesaic::checkpoint {
namespace {

// What people take for safetensors, by its first bytes; each of them would be a header length far
// beyond the cap.
struct ForeignFile {
  std::string_view magic, title;
  StatusCode code;
};
constexpr auto kOther = StatusCode::kUnsupported;
constexpr auto kBroken = StatusCode::kCorruptFile;
constexpr ForeignFile kForeignFiles[] = {
    {"\x93NUMPY", "a NumPy file", kOther},
    {"PK\x03\x04", "a zip archive (as .npz, .pt and .pth are)", kOther},
    {"\x80\x02", "a Python pickle", kOther},
    {"\x80\x04", "a Python pickle", kOther},
    {"\x80\x05", "a Python pickle", kOther},
    {"\x89HDF", "an HDF5 file", kOther},
    {"GGUF", "a GGUF file", kOther},
    {"version ", "the pointer of a Git LFS file that was not fetched", kBroken},
    {"<!DOCTYP", "an HTML page", kBroken},
    {"<!doctyp", "an HTML page", kBroken},
    {"<html", "an HTML page", kBroken},
};

Status header_too_large(std::string_view label, std::span<const std::byte> first_bytes,
                        std::uint64_t n) {
  const std::string_view first(reinterpret_cast<const char*>(first_bytes.data()),
                               first_bytes.size());
  for (const ForeignFile& other : kForeignFiles) {
    if (!first.starts_with(other.magic)) continue;
    return {other.code,
            fmt::format("{}: got {}, need a safetensors file, such as "
                        "safetensors.numpy.save_file({{\"hidden_states\": x}}, path) writes",
                        label, other.title)};
  }
  return {StatusCode::kLimitExceeded,
          fmt::format("{}: header too large: got {} bytes, need at most {}; is it a safetensors "
                      "file?",
                      label, n, kMaxHeaderBytes)};
}

}  // namespace

const TensorInfo* SafetensorsHeader::find(std::string_view name) const {
  const std::uint64_t hash = std::hash<std::string_view>{}(name);
  auto it = std::lower_bound(by_name_.begin(), by_name_.end(), hash,
                             [](const NameKey& key, std::uint64_t h) { return key.hash < h; });
  for (; it != by_name_.end() && it->hash == hash; ++it) {
    if (tensors_[it->index].name == name) return &tensors_[it->index];
  }
  return nullptr;
}

Result<std::uint64_t> safetensors_header_bytes(std::string_view label,
                                               std::span<const std::byte> first_bytes,
                                               std::uint64_t file_bytes) {
  if (file_bytes < 8 || first_bytes.size() < 8) {
    return Status(
        StatusCode::kCorruptFile,
        fmt::format("{}: header too small: got {} bytes, need at least 8", label, file_bytes));
  }
  std::uint64_t n = 0;
  for (std::size_t i = 8; i-- > 0;) n = n << 8 | static_cast<std::uint64_t>(first_bytes[i]);
  if (n > kMaxHeaderBytes) return header_too_large(label, first_bytes, n);
  if (n > file_bytes - 8) {
    return Status(
        StatusCode::kCorruptFile,
        fmt::format(
            "{}: invalid header length: got {} bytes, need at most {} (the rest of the file)",
            label, n, file_bytes - 8));
  }
  return n;
}

Result<SafetensorsHeader> parse_safetensors_header(std::string_view label, std::string_view header,
                                                   std::uint64_t file_bytes) {
  return guard_allocation(label, [&]() -> Result<SafetensorsHeader> {
    const std::string header_label = fmt::format("{}: header", label);
    if (file_bytes < 8 || header.size() > file_bytes - 8) {
      return Status(StatusCode::kInternal, header_label + ": longer than the file");
    }
    if (const std::size_t bad = first_invalid_utf8(header); bad != header.size()) {
      return Status(StatusCode::kCorruptFile,
                    fmt::format("{}: not UTF-8: byte 0x{:02x} at position {}", header_label,
                                static_cast<unsigned char>(header[bad]), bad));
    }
    // Only this format's own padding may surround the object; JSON itself would allow more.
    if (header.empty() || header.front() != '{') {
      return Status(
          StatusCode::kCorruptFile,
          fmt::format("{}: not valid JSON: got {}, need '{{' as the first byte", header_label,
                      header.empty() ? "no bytes" : quote_name(header.substr(0, 1))));
    }
    const std::size_t last = header.find_last_not_of(' ');
    const std::string_view json = header.substr(0, last + 1);
    if (json.back() != '}') {
      return Status(
          StatusCode::kCorruptFile,
          fmt::format("{}: not valid JSON: ends with {}, need '}}' followed by spaces only",
                      header_label, quote_name(json.substr(json.size() - 1))));
    }
    HeaderBuilder builder(label, header, file_bytes);
    const JsonLimits limits{.max_bytes = kMaxHeaderBytes, .max_depth = kMaxHeaderDepth};
    MOESAIC_RETURN_IF_ERROR(parse_json_events(header_label, json, limits, builder));
    MOESAIC_RETURN_IF_ERROR(builder.status());
    return builder.finish();
  });
}

}  // namespace moesaic::checkpoint
