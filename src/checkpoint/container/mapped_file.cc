#include "checkpoint/container/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "checkpoint/container/guard.h"

namespace moesaic::checkpoint {
namespace {

// One read call moves at most this much: Linux stops short of 2 GiB anyway.
constexpr std::size_t kMaxReadBytes = std::size_t{1} << 30;

Status system_error(const std::string& path, std::string_view what, int error) {
  const auto code = error == ENOENT ? StatusCode::kNotFound : StatusCode::kIo;
  return Status(code, fmt::format("{}: cannot {}: {}", path, what,
                                  std::error_code(error, std::generic_category()).message()));
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path, FileAccess access) {
  if (path.find('\0') != std::string::npos) {
    return Status(StatusCode::kInvalidArgument, "path: contains a NUL byte");
  }
  MappedFile file;
  file.path_ = path;
  // O_NONBLOCK: opening a pipe must not wait for a writer; it does nothing to regular files.
  file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) return system_error(path, "open", errno);
  struct stat info {};
  if (::fstat(file.fd_, &info) != 0) return system_error(path, "stat", errno);
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kIo,
                  fmt::format("{}: got a {}, need a regular file", path,
                              S_ISDIR(info.st_mode) ? "folder" : "pipe or device"));
  }
  file.size_ = static_cast<std::uint64_t>(info.st_size);
  if (access == FileAccess::kMmap && file.size_ > 0) {
    void* map = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, file.fd_, 0);
    if (map == MAP_FAILED) return system_error(path, "map into memory (copying may work)", errno);
    file.map_ = static_cast<std::byte*>(map);
  }
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  close();
  path_ = std::move(other.path_);
  fd_ = std::exchange(other.fd_, -1);
  size_ = std::exchange(other.size_, 0);
  map_ = std::exchange(other.map_, nullptr);
  return *this;
}

MappedFile::~MappedFile() { close(); }

void MappedFile::close() noexcept {
  if (map_ != nullptr) ::munmap(map_, size_);
  if (fd_ >= 0) ::close(fd_);
  map_ = nullptr;
  fd_ = -1;
}

Status MappedFile::read_at(std::uint64_t offset, std::span<std::byte> dst) const {
  if (offset > size_ || dst.size() > size_ - offset) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: read of {} bytes at {}, need an end within {} bytes", path_,
                              dst.size(), offset, size_));
  }
  while (!dst.empty()) {
    const std::size_t want = std::min(dst.size(), kMaxReadBytes);
    const ssize_t got = ::pread(fd_, dst.data(), want, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(path_, "read", errno);
    if (got == 0) {
      return Status(StatusCode::kIo,
                    fmt::format("{}: the file shrank while it was open: it ends at or before byte "
                                "{}, need {}",
                                path_, offset, size_));
    }
    offset += static_cast<std::uint64_t>(got);
    dst = dst.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

void MappedFile::drop_residency(std::uint64_t offset, std::uint64_t bytes) const {
  if (map_ == nullptr || bytes == 0 || offset > size_ || bytes > size_ - offset) return;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page;
  // Only advice: a failure costs memory, not correctness.
  (void)::madvise(map_ + begin, offset + bytes - begin, MADV_DONTNEED);
}

Result<std::string> read_text_file(const std::string& path, std::size_t max_bytes) {
  return guard_allocation(path, [&]() -> Result<std::string> {
    MOESAIC_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path, FileAccess::kCopy));
    if (file.size() > max_bytes) {
      return Status(StatusCode::kLimitExceeded,
                    fmt::format("{}: got {} bytes, need at most {}", path, file.size(), max_bytes));
    }
    std::string text(file.size(), '\0');
    MOESAIC_RETURN_IF_ERROR(
        file.read_at(0, std::as_writable_bytes(std::span<char>(text.data(), text.size()))));
    return text;
  });
}

}  // namespace moesaic::checkpoint
