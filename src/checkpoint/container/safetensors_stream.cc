#include "checkpoint/container/safetensors_stream.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "checkpoint/container/names.h"

namespace moesaic::checkpoint {

Status SafetensorsStream::system_error(std::string_view what, int error) const {
  return {StatusCode::kIo, fmt::format("{}: cannot {}: {}", path_, what,
                                       std::error_code(error, std::generic_category()).message())};
}

Result<SafetensorsStream> SafetensorsStream::create(
    const std::string& path, std::span<const TensorSpec> tensors,
    std::span<const std::pair<std::string, std::string>> metadata) {
  auto layout = layout_safetensors(tensors, metadata);
  if (!layout.ok()) return layout.status().with_context(path);
  SafetensorsStream stream;
  stream.path_ = path;
  stream.data_offset_ = layout->header.size();
  for (const SafetensorsLayout::Place& place : layout->places) {
    const TensorSpec& spec = tensors[place.tensor];
    stream.entries_.emplace(spec.name, Entry{spec, place.begin, place.bytes, 0});
  }
  stream.fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (stream.fd_ < 0) return stream.system_error("create", errno);
  // A disk that is too full says so now rather than after hours, where the file system can.
  const auto size = static_cast<off_t>(layout->header.size() + layout->data_bytes);
  const int refused = ::posix_fallocate(stream.fd_, 0, size);
  if (refused != 0 && refused != EOPNOTSUPP && refused != EINVAL) {
    return stream.system_error("reserve space", refused);
  }
  MOESAIC_RETURN_IF_ERROR(
      stream.write_all(0, std::as_bytes(std::span(layout->header.data(), layout->header.size()))));
  return stream;
}

SafetensorsStream::SafetensorsStream(SafetensorsStream&& other) noexcept {
  *this = std::move(other);
}
SafetensorsStream& SafetensorsStream::operator=(SafetensorsStream&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(data_offset_, other.data_offset_);
  std::swap(entries_, other.entries_);
  return *this;
}
SafetensorsStream::~SafetensorsStream() {
  if (fd_ >= 0) ::close(fd_);
}

Status SafetensorsStream::write_all(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t chunk = std::min<std::size_t>(bytes.size(), std::size_t{1} << 30);
    const ssize_t n = ::pwrite(fd_, bytes.data(), chunk, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return system_error("write", errno);
    offset += static_cast<std::uint64_t>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

Status SafetensorsStream::write(std::string_view name, std::uint64_t offset,
                                std::span<const std::byte> bytes) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    return {StatusCode::kNotFound,
            fmt::format("{}: tensor {} was not announced", path_, quote_name(name))};
  }
  Entry& entry = found->second;
  if (offset > entry.bytes || bytes.size() > entry.bytes - offset) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: tensor {}: got bytes {} .. {}, need at most {}", path_,
                        quote_name(name), offset, offset + bytes.size(), entry.bytes)};
  }
  entry.written += bytes.size();
  return write_all(data_offset_ + entry.begin + offset, bytes);
}

Status SafetensorsStream::write(std::string_view name, const ConstTensorView& tensor) {
  const auto found = entries_.find(name);
  if (found != entries_.end()) {
    MOESAIC_RETURN_IF_ERROR(expect_dtype(name, tensor, found->second.spec.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape(name, tensor, found->second.spec.shape));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(name, tensor));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(tensor.dtype, tensor.shape));
  return write(name, 0, {tensor.data, static_cast<std::size_t>(bytes)});
}

Status SafetensorsStream::finish() {
  for (const auto& [name, entry] : entries_) {
    if (entry.written == entry.bytes) continue;
    return {StatusCode::kInternal, fmt::format("{}: tensor {} got {} bytes, need {}", path_,
                                               quote_name(name), entry.written, entry.bytes)};
  }
  if (::fsync(fd_) != 0) return system_error("flush", errno);
  if (::close(std::exchange(fd_, -1)) != 0) return system_error("close", errno);
  return {};
}

}  // namespace moesaic::checkpoint
