// Which files make the set, and which tensor is in which.
#include "checkpoint/container/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::size_t kMaxNamesShown = 4;
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// The shard number of model-NNNNN-of-NNNNN.safetensors and the count, or {0, 0}. DeepSeek's own files
// have six digits in the count.
std::pair<unsigned long, unsigned long> shard_number(std::string_view name) {
  constexpr std::string_view kPrefix = "model-", kOf = "-of-";
  constexpr std::size_t kLeastDigits = 5, kMostDigits = 9;
  if (!name.starts_with(kPrefix) || !name.ends_with(kSafetensorsExtension)) return {0, 0};
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSafetensorsExtension.size());
  const std::size_t of = name.find(kOf);
  if (of == name.npos) return {0, 0};
  const auto number = [](std::string_view digits) -> std::optional<unsigned long> {
    if (digits.size() < kLeastDigits || digits.size() > kMostDigits) return std::nullopt;
    unsigned long n = 0;
    for (const char c : digits) {
      if (std::isdigit(static_cast<unsigned char>(c)) == 0) return std::nullopt;
      n = n * 10 + static_cast<unsigned long>(c - '0');
    }
    return n;
  };
  const auto shard = number(name.substr(0, of)), count = number(name.substr(of + kOf.size()));
  if (!shard || !count) return {0, 0};
  return {*shard, *count};
}

// The files of a folder without an index, sorted: model.safetensors and complete numbered sets.
Result<std::vector<std::string>> list_unindexed(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> names;
  std::map<unsigned long, std::vector<unsigned long>> sets;  // count -> numbers present
  fs::directory_iterator it(directory, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    std::string name = it->path().filename().string();
    const auto [number, count] = shard_number(name);
    if (count != 0) sets[count].push_back(number);
    if (count != 0 || name == kSingleFile) names.push_back(std::move(name));
  }
  if (error) {
    const bool absent = error == std::errc::no_such_file_or_directory;
    return Status(absent ? StatusCode::kNotFound : StatusCode::kIo,
                  fmt::format("{}: cannot list the folder: {}", directory, error.message()));
  }
  if (names.empty()) {
    return Status(StatusCode::kNotFound,
                  fmt::format("{}: no safetensors: need {}, {} or model-00001-of-NNNNN.safetensors",
                              directory, kIndexFile, kSingleFile));
  }
  for (auto& [count, numbers] : sets) {
    std::sort(numbers.begin(), numbers.end());
    for (unsigned long i = 1; i <= count; ++i) {
      if (i - 1 < numbers.size() && numbers[i - 1] == i) continue;
      return Status(StatusCode::kNotFound,
                    fmt::format("{}: shard {} of {} is missing (and there is no index)", directory,
                                i, count));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool by_name(const ShardSet::Located& a, const ShardSet::Located& b) {
  return a.info->name < b.info->name;
}

std::string join_path(const std::string& directory, std::string_view name) {
  return (std::filesystem::path(directory) / name).string();
}

}  // namespace

// Opens the listed files and checks the map against them.
Status ShardSet::open_indexed(const std::string& directory, const std::string& index_path,
                              const ShardIndex& index, FileAccess access) {
  std::map<std::string_view, const SafetensorsFile*> by_file;
  for (const auto& [tensor, name] : index.weight_map) by_file.emplace(name, nullptr);
  for (auto& [name, file] : by_file) {
    auto opened = SafetensorsFile::open(join_path(directory, name), access);
    if (!opened.ok()) {
      return opened.status().with_context(fmt::format("{}: file {}", index_path, quote_name(name)));
    }
    auto kept = std::make_shared<const SafetensorsFile>(std::move(opened).value());
    file = kept.get();
    files_.push_back(std::move(kept));
  }
  std::map<const SafetensorsFile*, std::size_t> mapped;  // tensors of each file that are in use
  tensors_.reserve(index.weight_map.size());
  for (const auto& [tensor, name] : index.weight_map) {
    const SafetensorsFile* file = by_file.find(name)->second;
    const TensorInfo* info = file->find(tensor);
    if (info == nullptr) {
      return Status(StatusCode::kMissingTensor,
                    fmt::format("{}: weight_map: tensor {} is not in {}", index_path,
                                quote_name(tensor), quote_name(name)));
    }
    tensors_.push_back({file, info});
    ++mapped[file];
  }
  for (const auto& [name, file] : by_file) {
    if (mapped[file] != file->tensors().size()) warn_ignored(*file);
  }
  return {};
}

void ShardSet::warn_ignored(const SafetensorsFile& file) {
  std::string shown;
  std::size_t count = 0;
  for (const TensorInfo& info : file.tensors()) {
    const auto located = find(info.name);
    if (located && located->file == &file) continue;
    if (count++ < kMaxNamesShown) shown += (shown.empty() ? "" : ", ") + quote_name(info.name);
  }
  warnings_.push_back(fmt::format(
      "{}: ignored {} tensor{} that the index does not map to this file: {}{}", file.path(), count,
      count == 1 ? "" : "s", shown, count > kMaxNamesShown ? ", ..." : ""));
}

Status ShardSet::open_unindexed(const std::string& directory, FileAccess access) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::string> names, list_unindexed(directory));
  for (const std::string& name : names) {
    MOESAIC_ASSIGN_OR_RETURN(auto file, SafetensorsFile::open(join_path(directory, name), access));
    auto kept = std::make_shared<const SafetensorsFile>(std::move(file));
    for (const TensorInfo& info : kept->tensors()) tensors_.push_back({kept.get(), &info});
    files_.push_back(std::move(kept));
  }
  return sort_unindexed(directory);
}

Status ShardSet::sort_unindexed(const std::string& label) {
  std::sort(tensors_.begin(), tensors_.end(), by_name);
  const auto same = std::adjacent_find(
      tensors_.begin(), tensors_.end(),
      [](const Located& a, const Located& b) { return a.info->name == b.info->name; });
  if (same != tensors_.end() && !MOESAIC_FAULT(shards_allow_duplicates)) {
    return Status(
        StatusCode::kCorruptFile,
        fmt::format("{}: tensor {} is in two files and no index says which counts: {} and {}",
                    label, quote_name(same->info->name), same->file->path(),
                    std::next(same)->file->path()));
  }
  return {};
}

Status ShardSet::sum_bytes(const std::string& label) {
  // Each file's bytes are below 2^63 and so is what a disk holds: the sum fits u64 for fewer than
  // two full address spaces of files, and sparse files are caught by the check.
  for (const Located& t : tensors_) {
    if (__builtin_add_overflow(total_bytes_, t.info->bytes(), &total_bytes_)) {
      return {StatusCode::kLimitExceeded,
              fmt::format("{}: overflow: all tensors exceed 2^64-1 bytes", label)};
    }
  }
  return {};
}

Result<ShardSet> ShardSet::open(const std::string& directory, FileAccess access) {
  return guard_allocation(directory, [&]() -> Result<ShardSet> {
    ShardSet set;
    const std::string index_path = join_path(directory, kIndexFile);
    auto text = read_text_file(index_path, kMaxIndexBytes);
    if (!text.ok() && text.status().code() != StatusCode::kNotFound) return text.status();
    std::optional<std::uint64_t> total_size;
    if (text.ok() && !MOESAIC_FAULT(shards_ignore_index)) {
      MOESAIC_ASSIGN_OR_RETURN(const ShardIndex index, parse_shard_index(index_path, *text));
      total_size = index.total_size;
      MOESAIC_RETURN_IF_ERROR(set.open_indexed(directory, index_path, index, access));
    } else {
      MOESAIC_RETURN_IF_ERROR(set.open_unindexed(directory, access));
    }
    MOESAIC_RETURN_IF_ERROR(set.sum_bytes(directory));
    if (total_size && *total_size != set.total_bytes_) {
      set.warnings_.push_back(
          fmt::format("{}: metadata.total_size is {}, the tensors have {} bytes", index_path,
                      *total_size, set.total_bytes_));
    }
    return set;
  });
}

ShardSet ShardSet::of(std::shared_ptr<const PushedTensors> tensors) {
  ShardSet set;
  for (const TensorInfo* info : tensors->tensors()) set.tensors_.push_back({tensors.get(), info});
  set.files_ = {std::move(tensors)};
  return set;
}

std::optional<ShardSet::Located> ShardSet::find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const Located& t, std::string_view wanted) { return t.info->name < wanted; });
  if (it == tensors_.end() || it->info->name != name) return std::nullopt;
  return *it;
}

}  // namespace moesaic::checkpoint
