// write_safetensors: the reference writer's bytes, put in place atomically.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "checkpoint/guard.h"
#include "checkpoint/json_strict.h"
#include "checkpoint/names.h"
#include "checkpoint/safetensors.h"
#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/checkpoint.h"

namespace moesaic {
namespace {

struct Placed {
  const NamedTensor* tensor;
  std::uint64_t bytes;
};

Status name_error(std::string_view what, std::string_view name, std::string_view text) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} {}: {}", what, quote_name(name), text));
}

// A JSON string literal exactly as compact writers emit it (non-ASCII characters stay as they are).
std::string json_string(std::string_view text) { return nlohmann::json(text).dump(); }

Status check_name(std::string_view what, std::string_view name) {
  if (first_invalid_utf8(name) != name.size()) return name_error(what, name, "is not UTF-8");
  return {};
}

// Validates and sorts: descending dtype (wider first, so that data stays naturally aligned), then
// name.
Result<std::vector<Placed>> place(std::span<const NamedTensor> tensors) {
  std::vector<Placed> placed;
  placed.reserve(tensors.size());
  for (const NamedTensor& t : tensors) {
    if (t.name.empty()) return Status(StatusCode::kInvalidArgument, "tensor name: is empty");
    if (t.name == "__metadata__") return name_error("tensor name", t.name, "is reserved");
    if (t.name.find('\0') != std::string::npos) {
      return name_error("tensor name", t.name, "contains a NUL character");
    }
    MOESAIC_RETURN_IF_ERROR(check_name("tensor name", t.name));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.name, t.tensor));
    auto bytes = contiguous_bytes(t.tensor.dtype, t.tensor.shape);
    if (!bytes.ok()) return bytes.status().with_context(quote_name(t.name));
    if (*bytes > 0 && t.tensor.data == nullptr) {
      return name_error("tensor", t.name, fmt::format("has no data, need {} bytes", *bytes));
    }
    placed.push_back({&t, static_cast<std::uint64_t>(*bytes)});
  }
  const bool keep_order = MOESAIC_FAULT(writer_keeps_argument_order);
  if (!keep_order) {
    std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
      const auto a_type = a.tensor->tensor.dtype;
      const auto b_type = b.tensor->tensor.dtype;
      return a_type != b_type ? a_type > b_type : a.tensor->name < b.tensor->name;
    });
  }
  // Names may repeat across types, so look for duplicates in an order of their own.
  std::vector<std::string_view> names;
  names.reserve(placed.size());
  for (const Placed& p : placed) names.push_back(p.tensor->name);
  std::sort(names.begin(), names.end());
  const auto same = std::adjacent_find(names.begin(), names.end());
  if (same != names.end()) return name_error("tensor name", *same, "is given twice");
  return placed;
}

// The 8 length bytes and the padded header.
Result<std::string> make_header(const std::vector<Placed>& placed,
                                std::span<const std::pair<std::string, std::string>> metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    std::vector<std::pair<std::string, std::string>> sorted(metadata.begin(), metadata.end());
    std::sort(sorted.begin(), sorted.end());
    json += "\"__metadata__\":{";
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      MOESAIC_RETURN_IF_ERROR(check_name("metadata key", sorted[i].first));
      MOESAIC_RETURN_IF_ERROR(check_name("metadata value", sorted[i].second));
      if (i > 0 && sorted[i].first == sorted[i - 1].first) {
        return name_error("metadata key", sorted[i].first, "is given twice");
      }
      json +=
          (i > 0 ? "," : "") + json_string(sorted[i].first) + ":" + json_string(sorted[i].second);
    }
    json += "}";
  }
  std::uint64_t begin = 0;
  for (const Placed& p : placed) {
    const auto end = checked_add_u64(begin, p.bytes);
    if (!end || *end > static_cast<std::uint64_t>(INT64_MAX) - kMaxHeaderBytes - 8) {
      return Status(StatusCode::kLimitExceeded, "the tensors together exceed 2^63-1 bytes");
    }
    std::string shape;
    for (const std::int64_t d : p.tensor->tensor.shape.dims()) {
      shape += fmt::format("{}{}", shape.empty() ? "" : ",", d);
    }
    json += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        json.size() > 1 ? "," : "", json_string(p.tensor->name),
                        dtype_name(p.tensor->tensor.dtype), shape, begin, *end);
    begin = *end;
  }
  json += "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  if (json.size() > kMaxHeaderBytes) {
    return Status(StatusCode::kLimitExceeded, fmt::format("header: got {} bytes, need at most {}",
                                                          json.size(), kMaxHeaderBytes));
  }
  std::string header;
  for (unsigned i = 0; i < 8; ++i) header += static_cast<char>(json.size() >> (8 * i) & 0xFF);
  return header + json;
}

// A file under a temporary name beside its destination; removed unless commit() succeeded.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {
    // A name of our own (process, counter) rather than a random one; O_EXCL settles the rest.
    static std::atomic<unsigned> counter{0};
    for (int attempt = 0; attempt < 100 && fd_ < 0; ++attempt) {
      temporary_ = fmt::format("{}.tmp-{}-{}", path_, ::getpid(), counter++);
      fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ < 0 && errno != EEXIST) break;
    }
    error_ = fd_ < 0 ? errno : 0;
    created_ = fd_ >= 0;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (created_) ::unlink(temporary_.c_str());
  }

  Status created() const { return error_ == 0 ? Status() : system_error("create", error_); }

  Status write(const void* data, std::uint64_t bytes) {
    const auto* p = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::write(fd_, p, std::min<std::uint64_t>(bytes, std::uint64_t{1} << 30));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return system_error("write", errno);
      p += n;
      bytes -= static_cast<std::uint64_t>(n);
    }
    return {};
  }

  // Data on the disk, then the name, then the folder: after a crash there is the old file or the
  // new.
  Status commit() {
    if (::fsync(fd_) != 0) return system_error("flush", errno);
    const int closed = ::close(std::exchange(fd_, -1));
    if (closed != 0) return system_error("close", errno);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) return system_error("rename", errno);
    created_ = false;
    const auto parent = std::filesystem::path(path_).parent_path();
    const int folder =
        ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) {
      (void)::fsync(folder);  // some file systems refuse; the rename itself has happened
      ::close(folder);
    }
    return {};
  }

 private:
  Status system_error(std::string_view what, int error) const {
    return Status(StatusCode::kIo,
                  fmt::format("{}: cannot {}: {}", path_, what,
                              std::error_code(error, std::generic_category()).message()));
  }
  std::string path_;
  std::string temporary_;
  int fd_ = -1;
  int error_ = 0;
  bool created_ = false;
};

}  // namespace

Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                         std::span<const std::pair<std::string, std::string>> metadata) {
  return guard_allocation(path, [&]() -> Status {
    auto placed = place(tensors);
    if (!placed.ok()) return placed.status().with_context(path);
    auto header = make_header(*placed, metadata);
    if (!header.ok()) return header.status().with_context(path);
    TemporaryFile file(path);
    MOESAIC_RETURN_IF_ERROR(file.created());
    MOESAIC_RETURN_IF_ERROR(file.write(header->data(), header->size()));
    for (const Placed& p : *placed) {
      MOESAIC_RETURN_IF_ERROR(file.write(p.tensor->tensor.data, p.bytes));
    }
    return file.commit();
  });
}

}  // namespace moesaic
