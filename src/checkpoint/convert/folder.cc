#include "checkpoint/convert/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxRecordBytes = 8'000'000;
constexpr std::string_view kTemporary = ".tmp-";

Status system_error(const std::string& path, std::string_view what, const std::error_code& error) {
  return {StatusCode::kIo,
          fmt::format("{}: cannot {}: {}", quote_name(path), what, error.message())};
}
Status system_error(const std::string& path, std::string_view what, int number) {
  return system_error(path, what, std::error_code(number, std::generic_category()));
}

Status refused(const std::string& path, std::string_view why) {
  return {StatusCode::kInvalidArgument, fmt::format("{}: {}", quote_name(path), why)};
}

// Whether `inner` is the folder `outer` or somewhere below it. Both real paths.
bool lies_in(const fs::path& inner, const fs::path& outer) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

// The folder's real path; its last part need not exist. A link to nothing is refused, as a folder
// made in its place would not be where the link says.
Result<fs::path> real_destination(const std::string& to) {
  if (to.empty()) return refused(to, "got no name, need a folder");
  fs::path path = to.substr(0, std::max<std::size_t>(to.find_last_not_of('/') + 1, 1));
  std::error_code error;
  if (fs::symlink_status(path, error).type() != fs::file_type::not_found) {
    const fs::path real = fs::canonical(path, error);
    if (error) return refused(to, "is a link that leads nowhere, need a new or an empty folder");
    return real;
  }
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const fs::path real = fs::canonical(parent, error);
  if (error) {
    return Status(StatusCode::kNotFound, fmt::format("{}: there is no folder {} to make it in",
                                                     quote_name(to), quote_name(parent.string())));
  }
  return real / path.filename();
}

// The model must stay whole: its folder, and the files that links in it lead to.
Status check_against_source(const std::string& from, const std::string& to, const fs::path& real) {
  std::error_code error;
  const fs::path source = fs::canonical(from, error);
  if (error) return {};  // opening the model will say what is wrong with it
  if (real == source) {
    return refused(to, "is the model's own folder, need another place");
  }
  if (lies_in(real, source)) {
    return refused(to,
                   fmt::format("lies inside the model {}, need another place", quote_name(from)));
  }
  if (lies_in(source, real)) {
    return refused(to, fmt::format("holds the model {}, need another place", quote_name(from)));
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(source, error)) {
    std::error_code ignored;
    const fs::path file = fs::canonical(entry.path(), ignored);
    if (!ignored && lies_in(file, real)) {
      return refused(to, fmt::format("holds the file that {} of the model is a link to, need "
                                     "another place",
                                     quote_name(entry.path().filename().string())));
    }
  }
  return {};
}

// Neither can be renamed away.
bool is_mount_point(const fs::path& folder) {
  struct stat here = {};
  struct stat above = {};
  if (::stat(folder.c_str(), &here) != 0) return false;
  if (::stat((folder / "..").c_str(), &above) != 0) return false;
  if (here.st_dev != above.st_dev || here.st_ino == above.st_ino) return true;  // or the root
#if defined(STATX_ATTR_MOUNT_ROOT)
  struct statx more = {};
  return ::statx(AT_FDCWD, folder.c_str(), 0, STATX_BASIC_STATS, &more) == 0 &&
         (more.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
#else
  return false;
#endif
}

// The files that the record in this folder lists; nothing without a record that is one.
std::optional<std::set<std::string>> recorded_files(const fs::path& folder) {
  const Result<std::string> text =
      read_text_file((folder / kConversionRecord).string(), kMaxRecordBytes);
  if (!text.ok()) return std::nullopt;
  // Not ordered_json, whose parser looks for each key among all before it.
  const auto record = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object() || !record.contains("scheme") || !record.contains("files") ||
      !record["files"].is_array()) {
    return std::nullopt;
  }
  std::set<std::string> files = {kConversionRecord};
  for (const auto& name : record["files"]) {
    files.insert(name_of_record(name));
  }
  return files;
}

// The first entry of the folder that no conversion wrote; empty: it is a result, or has no files.
Result<std::string> foreign_entry(const fs::path& folder) {
  std::error_code error;
  std::set<std::string> entries;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    entries.insert(it->path().filename().string());
  }
  if (error) return system_error(folder.string(), "list", error);
  if (entries.empty() || MOESAIC_FAULT(convert_takes_any_folder)) return std::string();
  const auto files = recorded_files(folder);
  for (const std::string& name : entries) {
    const bool plain = fs::symlink_status(folder / name, error).type() == fs::file_type::regular;
    if (!files || files->count(name) == 0 || !plain) return name;
  }
  return std::string();
}

Status check_content(const ConvertDestination& destination) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string foreign, foreign_entry(destination.path));
  if (foreign.empty() || destination.force) return {};
  return refused(destination.path,
                 fmt::format("exists and holds {}, which no conversion wrote; need a new folder, "
                             "an empty one or a result of convert, or --force to replace it",
                             quote_name(foreign)));
}

// Opens the mark in a folder and locks it; -1 when it is not there or somebody else has the lock.
int lock_mark(const std::string& folder, int flags) {
  const std::string path = fmt::format("{}/{}", folder, kConversionMark);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0666);
  if (fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

// Another process of that number that is not this one.
bool is_running(long process) {
  if (process == static_cast<long>(::getpid())) return false;
  return ::kill(static_cast<pid_t>(process), 0) == 0 || errno != ESRCH;
}

// What became of one left-over, in words.
std::string remove_leftover(const std::string& folder, long process) {
  const std::string name = quote_name(folder);
  if (is_running(process) && !MOESAIC_FAULT(convert_removes_live_folder)) {
    return fmt::format("{} is there and process {} is running: another conversion?", name, process);
  }
  std::error_code error;
  const bool marked = fs::exists(fs::symlink_status(fs::path(folder) / kConversionMark, error));
  const int mark = marked ? lock_mark(folder, 0) : -1;
  if (marked && mark < 0) return fmt::format("{} is there and in use: another conversion?", name);
  bool ours = marked;
  if (!marked) {
    const Result<std::string> foreign = foreign_entry(folder);
    ours = foreign.ok() && foreign->empty();
  }
  ours = ours || MOESAIC_FAULT(convert_removes_foreign_folder);
  if (ours) fs::remove_all(folder, error);
  if (mark >= 0) ::close(mark);
  if (!ours) {
    return fmt::format(
        "{} looks like the left-over of a conversion but holds files that none "
        "wrote: not removed",
        name);
  }
  if (error) return fmt::format("{} is left over and cannot be removed: {}", name, error.message());
  return fmt::format("removed {}, left over by process {}, which is gone", name, process);
}

// Names that a folder has, as they are now. Some file systems refuse: what they keep is theirs.
void flush_folder(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  (void)::fsync(fd);
  ::close(fd);
}
struct FlushedAtEnd {
  fs::path folder;
  ~FlushedAtEnd() { flush_folder(folder); }
};

}  // namespace

nlohmann::ordered_json recorded_name(const std::string& name) {
  if (first_invalid_utf8(name) == name.size()) return name;
  std::string hex;
  for (const char c : name) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return {{"bytes", hex}};
}

std::string name_of_record(const nlohmann::json& recorded) {
  if (recorded.is_string()) return recorded.get<std::string>();
  if (!recorded.is_object() || !recorded.contains("bytes") || !recorded["bytes"].is_string()) {
    return {};
  }
  const auto& hex = recorded["bytes"].get_ref<const std::string&>();
  std::string name;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    unsigned byte = 0;
    const auto [end, error] = std::from_chars(hex.data() + i, hex.data() + i + 2, byte, 16);
    if (error != std::errc() || end != hex.data() + i + 2) return {};
    name += static_cast<char>(byte);
  }
  return name;
}

Status flush_to_disk(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return system_error(path, "flush", errno);
  const int number = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return number == 0 ? Status() : system_error(path, "flush", number);
}

Result<ConvertDestination> check_destination(const std::string& from, const std::string& to,
                                             bool force) {
  MOESAIC_ASSIGN_OR_RETURN(const fs::path real, real_destination(to));
  ConvertDestination destination{real.string(), force};
  std::error_code error;
  const bool exists = fs::exists(real, error);
  if (exists && !fs::is_directory(real, error)) {
    return refused(to, "exists and is no folder, need a new or an empty folder");
  }
  MOESAIC_RETURN_IF_ERROR(check_against_source(from, to, real));
  if (exists && is_mount_point(real)) {
    return refused(to,
                   "is a mount point, which no finished folder can take the place of; need a "
                   "folder inside it");
  }
  const fs::path parent = real.parent_path();
  if (!fs::is_directory(parent, error)) {
    return refused(to, fmt::format("{} is no folder", quote_name(parent.string())));
  }
  if (::access(parent.c_str(), W_OK | X_OK) != 0) {
    return system_error(parent.string(), "write to this folder", errno);
  }
  if (!exists) return destination;
  MOESAIC_RETURN_IF_ERROR(check_content(destination));
  // Of an empty one as well: the new folder has its name, and whoever stands in the old one sees none.
  if (lies_in(fs::current_path(error), real)) {
    return refused(to, "is or holds the current folder, which would be gone; need another place");
  }
  return destination;
}

void remove_leftovers(const std::string& path, std::vector<std::string>* notes) {
  const fs::path real(path);
  const std::string start = real.filename().string() + std::string(kTemporary);
  std::error_code error;
  std::vector<std::pair<std::string, long>> found;
  for (fs::directory_iterator it(real.parent_path(), error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(start)) continue;
    const std::string digits = name.substr(start.size());
    const bool number = !digits.empty() && digits.size() <= 9 &&
                        digits.find_first_not_of("0123456789") == std::string::npos;
    std::error_code ignored;
    if (!number || it->symlink_status(ignored).type() != fs::file_type::directory) continue;
    found.emplace_back(it->path().string(), std::stol(digits));
  }
  std::sort(found.begin(), found.end());
  for (const auto& [folder, process] : found) notes->push_back(remove_leftover(folder, process));
}

Result<TemporaryFolder> TemporaryFolder::create(const ConvertDestination& destination) {
  TemporaryFolder folder;
  folder.destination_ = destination;
  std::string name = fmt::format("{}{}{}", destination.path, kTemporary, ::getpid());
  std::error_code error;
  if (!fs::create_directory(name, error)) {
    if (!error) error = std::make_error_code(std::errc::file_exists);
    return system_error(name, "create", error);
  }
  folder.temporary_ = std::move(name);
  folder.mark_ = lock_mark(folder.temporary_, O_CREAT | O_EXCL);
  // File systems without locks: the mark alone must do.
  if (folder.mark_ < 0 && !fs::exists(folder.file(kConversionMark), error)) {
    return system_error(folder.file(kConversionMark), "create", errno);
  }
  return folder;
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : destination_(std::move(other.destination_)),
      temporary_(std::exchange(other.temporary_, {})),
      mark_(std::exchange(other.mark_, -1)) {}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
  if (mark_ >= 0) ::close(mark_);
}

std::string TemporaryFolder::file(std::string_view name) const {
  return fmt::format("{}/{}", temporary_, name);
}

Result<std::vector<std::string>> TemporaryFolder::files() const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(temporary_, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) return system_error(temporary_, "list", error);
  std::erase(names, kConversionMark);
  std::sort(names.begin(), names.end());
  return names;
}

Status TemporaryFolder::commit() {
  const std::string& path = destination_.path;
  std::error_code error;
  const bool exists = fs::exists(path, error);
  if (exists) MOESAIC_RETURN_IF_ERROR(check_content(destination_));
  fs::remove(file(kConversionMark), error);
  if (error) return system_error(file(kConversionMark), "remove", error);
  const auto failed = [&](int number) {
    return system_error(path, "give the finished folder this name", number);
  };
  flush_folder(temporary_);
  const FlushedAtEnd parent{fs::path(path).parent_path()};
  if (!exists || fs::is_empty(path, error)) {
    if (std::rename(temporary_.c_str(), path.c_str()) != 0) return failed(errno);
    temporary_.clear();
    return {};
  }
#if defined(RENAME_EXCHANGE)
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    return {};  // the old folder has the temporary name now and goes with this object
  }
#endif
  const std::string old = temporary_ + "-old";
  if (std::rename(path.c_str(), old.c_str()) != 0) return failed(errno);
  if (std::rename(temporary_.c_str(), path.c_str()) != 0) {
    const int number = errno;
    std::rename(old.c_str(), path.c_str());
    return failed(number);
  }
  temporary_ = old;
  return {};
}

}  // namespace moesaic::checkpoint
