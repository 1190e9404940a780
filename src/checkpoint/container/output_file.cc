#include "checkpoint/container/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr int kMaxLinks = 40;  // as the kernel
// Leaves room for the suffix of the temporary name in the 255 bytes of a file name.
constexpr std::size_t kMaxTemporaryStem = 200;

Status output_error(const std::string& path, std::string_view what, int error) {
  return {StatusCode::kIo, fmt::format("{}: cannot {}: {}", path, what,
                                       std::error_code(error, std::generic_category()).message())};
}

// The descriptor that a path stands for, or -1. Opening such a path again would begin at byte 0 of
// a redirected file, and fails for a socket.
int named_descriptor(std::string_view path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    if (!path.starts_with(folder)) continue;
    const std::string_view digits = path.substr(folder.size());
    constexpr std::size_t kMaxDigits = 6;
    if (digits.empty() || digits.size() > kMaxDigits ||
        digits.find_first_not_of("0123456789") != std::string_view::npos) {
      return -1;
    }
    return std::atoi(std::string(digits).c_str());
  }
  return -1;
}

void take_identity(const struct stat& info, OutputTarget* target) {
  target->device = info.st_dev;
  target->inode = info.st_ino;
  target->bytes = static_cast<std::uint64_t>(info.st_size);
  target->mode = info.st_mode;
  target->owner = info.st_uid;
  target->group = info.st_gid;
}

Result<OutputTarget> find_descriptor(OutputTarget target, int descriptor) {
  struct stat info {};
  if (::fstat(descriptor, &info) != 0) return output_error(target.given, "write", errno);
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) {
    return output_error(target.given, "write", EBADF);
  }
  take_identity(info, &target);
  target.kind = OutputTarget::Kind::kStream;
  target.descriptor = descriptor;
  return target;
}

// The name behind a chain of links whose end does not exist.
Result<std::string> follow_dangling(const std::string& path) {
  std::string name = path;
  for (int i = 0; i < kMaxLinks; ++i) {
    std::array<char, PATH_MAX> text{};
    const ssize_t n = ::readlink(name.c_str(), text.data(), text.size());
    if (n < 0) return name;  // no link (any more)
    const std::filesystem::path to(std::string(text.data(), static_cast<std::size_t>(n)));
    name =
        to.is_absolute() ? to.string() : (std::filesystem::path(name).parent_path() / to).string();
  }
  return output_error(path, "follow the link", ELOOP);
}

std::string folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

std::string path_of(int descriptor) { return fmt::format("/proc/self/fd/{}", descriptor); }

Result<OutputTarget> find_new(OutputTarget target) {
  MOESAIC_ASSIGN_OR_RETURN(target.path, follow_dangling(target.given));
  // A name that ends in a slash is a folder's.
  if (target.path.ends_with('/')) return output_error(target.given, "create", EISDIR);
  const std::string folder = folder_of(target.path);
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    return output_error(target.given, "create", errno);
  }
  return target;
}

Result<OutputTarget> find_file(OutputTarget target, const struct stat& info) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(target.given.c_str(), nullptr),
                                                         &std::free);
  if (!real) return output_error(target.given, "follow the link", errno);
  target.path = real.get();
  struct stat behind {};
  // A link of /proc may name a file that has been removed since.
  if (::lstat(target.path.c_str(), &behind) != 0 || behind.st_ino != info.st_ino ||
      behind.st_dev != info.st_dev) {
    return output_error(target.given, "follow the link", ENOENT);
  }
  if (::faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) != 0 ||
      ::faccessat(AT_FDCWD, folder_of(target.path).c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    return output_error(target.given, "replace", errno);
  }
  target.kind = OutputTarget::Kind::kFile;
  return target;
}

}  // namespace

Result<OutputTarget> find_output(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Status(StatusCode::kInvalidArgument,
                  path.empty() ? "path: is empty, need a file" : "path: contains a NUL byte");
  }
  OutputTarget target;
  target.given = target.path = path;
  if (const int descriptor = named_descriptor(path); descriptor >= 0) {
    return find_descriptor(std::move(target), descriptor);
  }
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return find_new(std::move(target));
    return output_error(path, "create", errno);
  }
  take_identity(info, &target);
  if (S_ISREG(info.st_mode) || MOESAIC_FAULT(output_renames_over_devices)) {
    return find_file(std::move(target), info);
  }
  if (S_ISCHR(info.st_mode) || S_ISFIFO(info.st_mode)) {
    target.kind = OutputTarget::Kind::kStream;
    return target;
  }
  return Status(StatusCode::kIo,
                fmt::format("{}: got a {}, need a file, a pipe or a character device", path,
                            S_ISDIR(info.st_mode)   ? "folder"
                            : S_ISBLK(info.st_mode) ? "block device"
                                                    : "socket"));
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Status OutputFile::system_error(std::string_view what, int error) const {
  return output_error(target_.given, what, error);
}

bool OutputFile::create_unnamed() {
  if (MOESAIC_FAULT(output_has_a_name_while_written)) return false;
  fd_ = ::open(folder_of(target_.path).c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0666);
  if (fd_ < 0) return false;
  if (::access(path_of(fd_).c_str(), F_OK) == 0) return true;
  ::close(std::exchange(fd_, -1));  // without /proc it could get no name later
  return false;
}

template <class Make>
Status OutputFile::give_name(std::string_view what, Make&& make) {
  // A name of our own (process, counter) rather than a random one; what is there is left alone.
  static std::atomic<unsigned> counter{0};
  const std::filesystem::path path(target_.path);
  const std::string stem = path.filename().string().substr(0, kMaxTemporaryStem);
  int error = EEXIST;
  for (int attempt = 0; attempt < 100 && error == EEXIST; ++attempt) {
    const std::string name =
        path.parent_path() / fmt::format("{}.tmp-{}-{}", stem, ::getpid(), counter++);
    error = make(name.c_str()) < 0 ? errno : 0;
    if (error == 0) temporary_ = name;
  }
  return error == 0 ? Status() : system_error(what, error);
}

Status OutputFile::create_temporary() {
  if (!create_unnamed()) {
    MOESAIC_RETURN_IF_ERROR(give_name("create", [&](const char* name) {
      return fd_ = ::open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }));
  }
  take_permissions();
  return {};
}

void OutputFile::take_permissions() {
  if (target_.kind != OutputTarget::Kind::kFile) return;
  // Owner first: changing it may clear permission bits. Neither decides over success.
  if (::fchown(fd_, target_.owner, target_.group) != 0) errno = 0;
  if (::fchmod(fd_, target_.mode & 0777) != 0) errno = 0;
}

Status OutputFile::copy_to_named() {
  const int from = std::exchange(fd_, -1);
  const auto copy = [&]() -> Status {
    MOESAIC_RETURN_IF_ERROR(give_name("create", [&](const char* name) {
      return fd_ = ::open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }));
    take_permissions();
    std::array<char, std::size_t{1} << 16> piece{};
    for (off_t at = 0;;) {
      const ssize_t n = ::pread(from, piece.data(), piece.size(), at);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return system_error("read back", errno);
      if (n == 0) break;
      MOESAIC_RETURN_IF_ERROR(write(piece.data(), static_cast<std::uint64_t>(n)));
      at += n;
    }
    return ::fsync(fd_) == 0 ? Status() : system_error("flush", errno);
  };
  Status status = copy();
  ::close(from);
  return status;
}

Result<OutputFile> OutputFile::create(OutputTarget target) {
  OutputFile file;
  file.target_ = std::move(target);
  if (file.target_.kind != OutputTarget::Kind::kStream) {
    MOESAIC_RETURN_IF_ERROR(file.create_temporary());
    return file;
  }
  file.fd_ = file.target_.descriptor >= 0
                 ? ::fcntl(file.target_.descriptor, F_DUPFD_CLOEXEC, 0)
                 : ::open(file.target_.path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (file.fd_ < 0) return file.system_error("open", errno);
  return file;
}

Status OutputFile::write(const void* data, std::uint64_t bytes) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, std::min<std::uint64_t>(bytes, std::uint64_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {  // somebody made the pipe behind stdout non-blocking
      pollfd ready{fd_, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (n < 0) return system_error("write", errno);
    p += n;
    bytes -= static_cast<std::uint64_t>(n);
  }
  return {};
}

Status OutputFile::commit() {
  if (target_.kind == OutputTarget::Kind::kStream) {
    if (::close(std::exchange(fd_, -1)) != 0) return system_error("close", errno);
    return {};
  }
  if (::fsync(fd_) != 0) return system_error("flush", errno);
  if (temporary_.empty()) {
    const std::string from = path_of(fd_);
    Status named = give_name("create", [&](const char* name) {
      return ::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW);
    });
    // Some network and stacked file systems, and sandboxes, refuse links and write files.
    if (!named.ok() && MOESAIC_FAULT(output_needs_links)) return named;
    if (!named.ok()) MOESAIC_RETURN_IF_ERROR(copy_to_named());
  }
  if (::close(std::exchange(fd_, -1)) != 0) return system_error("close", errno);
  if (::rename(temporary_.c_str(), target_.path.c_str()) != 0) {
    return system_error("rename", errno);
  }
  temporary_.clear();
  const int folder = ::open(folder_of(target_.path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    (void)::fsync(folder);  // some file systems refuse; the rename itself has happened
    ::close(folder);
  }
  return {};
}

Status write_output_text(const std::string& path, std::string_view text) {
  MOESAIC_ASSIGN_OR_RETURN(OutputTarget target, find_output(path));
  MOESAIC_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(std::move(target)));
  MOESAIC_RETURN_IF_ERROR(file.write(text.data(), text.size()));
  return file.commit();
}

}  // namespace moesaic::checkpoint
