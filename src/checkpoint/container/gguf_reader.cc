#include "checkpoint/container/gguf_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace moesaic::checkpoint {

Status GgufBytes::read_at(std::uint64_t offset, std::span<std::byte> dst) const {
  if (file_ != nullptr) return file_->read_at(offset, dst);
  if (offset > memory_.size() || dst.size() > memory_.size() - offset) {
    return {StatusCode::kInvalidArgument, "read beyond the end"};
  }
  std::copy_n(memory_.begin() + static_cast<std::ptrdiff_t>(offset), dst.size(), dst.begin());
  return {};
}

GgufReader::GgufReader(const GgufBytes& bytes, std::string_view label, std::uint64_t limit)
    : bytes_(bytes), label_(label), limit_(limit) {}

Status GgufReader::need(std::uint64_t bytes, std::string_view what) const {
  if (bytes > left()) {
    return {StatusCode::kCorruptFile,
            fmt::format("{}: {}: got {} bytes at {}, need {}: the file ends too early", label_,
                        what, left(), position_, bytes)};
  }
  if (position_ > limit_ || bytes > limit_ - position_) {
    return {StatusCode::kLimitExceeded,
            fmt::format("{}: {}: the header goes beyond byte {}, need at most {}", label_, what,
                        position_ + bytes, limit_)};
  }
  return {};
}

Result<const std::byte*> GgufReader::take(std::size_t n, std::string_view what) {
  MOESAIC_RETURN_IF_ERROR(need(n, what));
  const bool inside = position_ >= window_begin_ && position_ - window_begin_ <= window_.size() &&
                      n <= window_.size() - (position_ - window_begin_);
  if (!inside) {
    window_.resize(std::min<std::uint64_t>(kWindow, left()));
    window_begin_ = position_;
    MOESAIC_RETURN_IF_ERROR(bytes_.read_at(position_, window_));
  }
  const std::byte* at = window_.data() + (position_ - window_begin_);
  position_ += n;
  return at;
}

template <class T>
Result<T> GgufReader::number(std::string_view what) {
  MOESAIC_ASSIGN_OR_RETURN(const std::byte* at, take(sizeof(T), what));
  T value = 0;
  std::memcpy(&value, at, sizeof(T));  // little-endian, as this library's machines are
  return value;
}
template Result<std::uint8_t> GgufReader::number(std::string_view);
template Result<std::uint16_t> GgufReader::number(std::string_view);
template Result<std::uint32_t> GgufReader::number(std::string_view);
template Result<std::uint64_t> GgufReader::number(std::string_view);

Status GgufReader::skip(std::uint64_t bytes, std::string_view what) {
  MOESAIC_RETURN_IF_ERROR(need(bytes, what));
  position_ += bytes;
  return {};
}

Result<std::string> GgufReader::string(std::string_view what, std::uint64_t max_bytes) {
  MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t size, u64(what));
  MOESAIC_RETURN_IF_ERROR(need(size, what));
  if (size > max_bytes) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("{}: {}: got a string of {} bytes at {}, need at most {}", label_,
                              what, size, position_, max_bytes));
  }
  std::string text(size, '\0');
  MOESAIC_RETURN_IF_ERROR(
      bytes_.read_at(position_, std::as_writable_bytes(std::span<char>(text.data(), text.size()))));
  position_ += size;
  return text;
}

Status GgufReader::skip_string(std::string_view what) {
  MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t size, u64(what));
  return skip(size, what);
}

}  // namespace moesaic::checkpoint
