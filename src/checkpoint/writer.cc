// write_safetensors: the reference writer's bytes, put in place atomically.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <vector>

#include "checkpoint/guard.h"
#include "checkpoint/names.h"
#include "checkpoint/safetensors_layout.h"
#include "moesaic/checkpoint.h"

namespace moesaic {
namespace {

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
    std::vector<TensorSpec> specs;
    specs.reserve(tensors.size());
    for (const NamedTensor& t : tensors) {
      MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.name, t.tensor).with_context(path));
      specs.push_back({t.name, t.tensor.dtype, t.tensor.shape});
    }
    auto layout = layout_safetensors(specs, metadata);
    if (!layout.ok()) return layout.status().with_context(path);
    for (const SafetensorsLayout::Place& p : layout->places) {
      if (p.bytes == 0 || tensors[p.tensor].tensor.data != nullptr) continue;
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: tensor {}: has no data, need {} bytes", path,
                          quote_name(tensors[p.tensor].name), p.bytes)};
    }
    TemporaryFile file(path);
    MOESAIC_RETURN_IF_ERROR(file.created());
    MOESAIC_RETURN_IF_ERROR(file.write(layout->header.data(), layout->header.size()));
    for (const SafetensorsLayout::Place& p : layout->places) {
      MOESAIC_RETURN_IF_ERROR(file.write(tensors[p.tensor].tensor.data, p.bytes));
    }
    return file.commit();
  });
}

}  // namespace moesaic
