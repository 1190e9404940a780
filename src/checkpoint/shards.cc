#include "checkpoint/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "checkpoint/guard.h"
#include "checkpoint/json_strict.h"
#include "checkpoint/names.h"
#include "core/fault.h"

namespace moesaic {
namespace {

constexpr std::size_t kMaxNamesShown = 4;
constexpr std::string_view kExtension = ".safetensors";
constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// Why `name` may not be used as a file inside the model folder, or empty when it may.
std::string_view unsafe_file_name(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.find('/') != std::string_view::npos) return "contains '/'";
  if (name.find('\\') != std::string_view::npos) return "contains '\\'";
  if (name.find("..") != std::string_view::npos) return "contains '..'";
  if (name.find(':') != std::string_view::npos) return "contains ':' (drive form)";
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return "contains a control character";
  }
  if (name.size() <= kExtension.size() || !name.ends_with(kExtension)) {
    return "does not end with .safetensors";
  }
  return {};
}

// State machine over {"metadata": {"total_size": n, ...}, "weight_map": {tensor: file}, ...}.
class IndexReader final : public JsonEvents {
 public:
  explicit IndexReader(std::string_view label) : label_(label) {}

  bool on_null() override { return other("null"); }
  bool on_bool(bool value) override { return other(value ? "true" : "false"); }
  bool on_unsigned(std::uint64_t value) override {
    if (want_ == Want::kTotalSize) {
      index_.total_size = value;
      want_ = Want::kMetadataKey;
      return true;
    }
    return other("a number");
  }
  bool on_negative(std::int64_t) override { return other("a negative number"); }
  bool on_real(double value, std::string_view) override {
    if (want_ == Want::kTotalSize) {
      // Advisory, and some writers compute it in floating point.
      if (value >= 0 && value <= 9007199254740992.0) {
        index_.total_size = static_cast<std::uint64_t>(value);
      }
      want_ = Want::kMetadataKey;
      return true;
    }
    return other("a number");
  }
  bool on_string(std::string_view value) override;
  bool on_key(std::string_view key) override;
  bool on_start_object() override;
  bool on_end_object() override;
  bool on_start_array() override {
    return want_ == Want::kUnknown ? unknown_.start_array() : other("an array");
  }
  bool on_end_array() override {
    unknown_.end_array();
    return leave_unknown();
  }

  const Status& status() const { return status_; }
  Result<ShardIndex> finish();

 private:
  enum class Want {
    kRoot,
    kTopKey,
    kMetadata,
    kMetadataKey,
    kTotalSize,
    kWeightMap,
    kTensor,
    kFile,
    kUnknown
  };

  bool fail(StatusCode code, std::string_view text) {
    status_ = Status(code, fmt::format("{}: {}", label_, text));
    return false;
  }
  bool fail_unknown() { return fail(unknown_.code(), unknown_.reason()); }
  bool leave_unknown() {
    if (unknown_.done()) want_ = in_metadata_ ? Want::kMetadataKey : Want::kTopKey;
    return true;
  }
  bool other(std::string_view found);

  std::string_view label_;
  Want want_ = Want::kRoot;
  bool in_metadata_ = false;
  bool seen_weight_map_ = false;
  std::string tensor_;
  // Duplicates among the keys of the top object and of "metadata"; unknown_ watches below them.
  UnknownJson top_keys_;
  UnknownJson metadata_keys_;
  UnknownJson unknown_;
  ShardIndex index_;
  Status status_;
};

bool IndexReader::other(std::string_view found) {
  switch (want_) {
    case Want::kUnknown:
      return leave_unknown();
    case Want::kMetadata:
      return fail(StatusCode::kCorruptFile, fmt::format("metadata: got {}, need an object", found));
    case Want::kTotalSize:
      return fail(StatusCode::kCorruptFile,
                  fmt::format("metadata.total_size: got {}, need a number of bytes", found));
    case Want::kWeightMap:
      return fail(StatusCode::kCorruptFile,
                  fmt::format("weight_map: got {}, need an object of file names", found));
    case Want::kFile:
      return fail(StatusCode::kCorruptFile,
                  fmt::format("weight_map: tensor {}: got {}, need a file name",
                              quote_name(tensor_), found));
    default:
      return fail(StatusCode::kCorruptFile, fmt::format("index: got {}, need an object", found));
  }
}

bool IndexReader::on_string(std::string_view value) {
  if (want_ != Want::kFile) return other("a string");
  if (const auto reason = unsafe_file_name(value); !reason.empty()) {
    return fail(
        StatusCode::kCorruptFile,
        fmt::format("weight_map: tensor {}: file name {} {}; need a plain .safetensors file name",
                    quote_name(tensor_), quote_name(value), reason));
  }
  index_.weight_map.emplace_back(std::move(tensor_), value);
  want_ = Want::kTensor;
  return true;
}

bool IndexReader::on_key(std::string_view key) {
  if (want_ == Want::kTensor) {
    if (key.empty()) return fail(StatusCode::kCorruptFile, "weight_map: got an empty tensor name");
    tensor_ = key;
    want_ = Want::kFile;
    return true;
  }
  if (want_ == Want::kUnknown) return unknown_.key(key) || fail_unknown();
  UnknownJson& keys = in_metadata_ ? metadata_keys_ : top_keys_;
  if (!keys.add_sibling(key)) return fail(keys.code(), keys.reason());
  want_ = Want::kUnknown;
  if (in_metadata_ && key == "total_size") want_ = Want::kTotalSize;
  if (!in_metadata_ && key == "metadata") want_ = Want::kMetadata;
  if (!in_metadata_ && key == "weight_map") want_ = Want::kWeightMap;
  return true;
}

bool IndexReader::on_start_object() {
  switch (want_) {
    case Want::kRoot:
      want_ = Want::kTopKey;
      return true;
    case Want::kMetadata:
      in_metadata_ = true;
      want_ = Want::kMetadataKey;
      return true;
    case Want::kWeightMap:
      seen_weight_map_ = true;
      want_ = Want::kTensor;
      return true;
    case Want::kUnknown:
      return unknown_.start_object();
    default:
      return other("an object");
  }
}

bool IndexReader::on_end_object() {
  if (want_ == Want::kUnknown) {
    unknown_.end_object();
    return leave_unknown();
  }
  in_metadata_ = false;  // the end of metadata, of weight_map or of the whole
  want_ = Want::kTopKey;
  return true;
}

Result<ShardIndex> IndexReader::finish() {
  auto& map = index_.weight_map;
  if (!seen_weight_map_) {
    fail(StatusCode::kCorruptFile, "weight_map is missing");
  } else if (map.empty()) {
    fail(StatusCode::kCorruptFile, "weight_map: got no tensors, need at least one");
  }
  MOESAIC_RETURN_IF_ERROR(status_);
  std::sort(map.begin(), map.end());
  const auto same = std::adjacent_find(
      map.begin(), map.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
  if (same != map.end()) {
    fail(StatusCode::kCorruptFile,
         fmt::format("weight_map: duplicate key {}", quote_name(same->first)));
    return status_;
  }
  return std::move(index_);
}

// The shard number of model-NNNNN-of-NNNNN.safetensors and the count, or {0, 0}.
std::pair<unsigned long, unsigned long> shard_number(std::string_view name) {
  constexpr std::string_view kPrefix = "model-";
  constexpr std::size_t kDigits = 5;
  constexpr std::string_view kOf = "-of-";
  if (name.size() != kPrefix.size() + 2 * kDigits + kOf.size() + kExtension.size() ||
      !name.starts_with(kPrefix) || !name.ends_with(kExtension) ||
      name.substr(kPrefix.size() + kDigits, kOf.size()) != kOf) {
    return {0, 0};
  }
  const auto number = [](std::string_view digits) {
    unsigned long n = 0;
    for (const char c : digits) {
      if (std::isdigit(static_cast<unsigned char>(c)) == 0) return 0UL;
      n = n * 10 + static_cast<unsigned long>(c - '0');
    }
    return n;
  };
  return {number(name.substr(kPrefix.size(), kDigits)),
          number(name.substr(kPrefix.size() + kDigits + kOf.size(), kDigits))};
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

Result<ShardIndex> parse_shard_index(std::string_view label, std::string_view json) {
  return guard_allocation(label, [&]() -> Result<ShardIndex> {
    IndexReader reader(label);
    const JsonLimits limits{.max_bytes = kMaxIndexBytes, .max_depth = kMaxHeaderDepth};
    MOESAIC_RETURN_IF_ERROR(parse_json_events(label, json, limits, reader));
    MOESAIC_RETURN_IF_ERROR(reader.status());
    return reader.finish();
  });
}

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
    files_.push_back(std::make_unique<SafetensorsFile>(std::move(opened).value()));
    file = files_.back().get();
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
  for (const auto& file : files_) {
    if (mapped[file.get()] != file->tensors().size()) warn_ignored(*file);
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
    files_.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
    for (const TensorInfo& info : files_.back()->tensors()) {
      tensors_.push_back({files_.back().get(), &info});
    }
  }
  std::sort(tensors_.begin(), tensors_.end(), by_name);
  const auto same = std::adjacent_find(
      tensors_.begin(), tensors_.end(),
      [](const Located& a, const Located& b) { return a.info->name == b.info->name; });
  if (same != tensors_.end() && !MOESAIC_FAULT(shards_allow_duplicates)) {
    return Status(
        StatusCode::kCorruptFile,
        fmt::format("{}: tensor {} is in two files and no index says which counts: {} and {}",
                    directory, quote_name(same->info->name), same->file->path(),
                    std::next(same)->file->path()));
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
    // Each file's bytes are below 2^63 and so is what a disk holds: the sum fits u64 for fewer than
    // two full address spaces of files, and sparse files are caught by the check.
    for (const Located& t : set.tensors_) {
      if (__builtin_add_overflow(set.total_bytes_, t.info->bytes(), &set.total_bytes_)) {
        return Status(StatusCode::kLimitExceeded,
                      fmt::format("{}: overflow: all tensors exceed 2^64-1 bytes", directory));
      }
    }
    if (total_size && *total_size != set.total_bytes_) {
      set.warnings_.push_back(
          fmt::format("{}: metadata.total_size is {}, the tensors have {} bytes", index_path,
                      *total_size, set.total_bytes_));
    }
    return set;
  });
}

std::optional<ShardSet::Located> ShardSet::find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const Located& t, std::string_view wanted) { return t.info->name < wanted; });
  if (it == tensors_.end() || it->info->name != name) return std::nullopt;
  return *it;
}

}  // namespace moesaic
