// model.safetensors.index.json.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_members.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/shards.h"

namespace moesaic::checkpoint {
namespace {

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
  if (name.size() <= kSafetensorsExtension.size() || !name.ends_with(kSafetensorsExtension)) {
    return "does not end with .safetensors";
  }
  return {};
}

// State machine over {"metadata": {"total_size": n, ...}, "weight_map": {tensor: file}, ...}.
class IndexReader final : public JsonMembers {
 public:
  using JsonMembers::JsonMembers;

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
  };

  bool take_unsigned(std::uint64_t value) override;
  bool take_real(double value, std::string_view literal) override;
  bool take_string(std::string_view value) override;
  bool take_key(std::string_view key) override;
  bool start_object() override;
  bool end_object() override;
  bool unexpected(std::string_view found) override;

  Want want_ = Want::kRoot;
  bool in_metadata_ = false;
  bool seen_weight_map_ = false;
  std::string tensor_;
  // Duplicates among the keys of the top object and of "metadata"; unknown_ watches below them.
  UnknownJson top_keys_;
  UnknownJson metadata_keys_;
  ShardIndex index_;
};

bool IndexReader::unexpected(std::string_view found) {
  switch (want_) {
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

bool IndexReader::take_unsigned(std::uint64_t value) {
  if (want_ != Want::kTotalSize) return JsonMembers::take_unsigned(value);
  index_.total_size = value;
  want_ = Want::kMetadataKey;
  return true;
}

bool IndexReader::take_real(double value, std::string_view literal) {
  if (want_ != Want::kTotalSize) return JsonMembers::take_real(value, literal);
  // Advisory, and some writers compute it in floating point.
  if (value >= 0 && value <= 9007199254740992.0) {
    index_.total_size = static_cast<std::uint64_t>(value);
  }
  want_ = Want::kMetadataKey;
  return true;
}

bool IndexReader::take_string(std::string_view value) {
  if (want_ != Want::kFile) return JsonMembers::take_string(value);
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

bool IndexReader::take_key(std::string_view key) {
  if (want_ == Want::kTensor) {
    if (key.empty()) return fail(StatusCode::kCorruptFile, "weight_map: got an empty tensor name");
    tensor_ = key;
    want_ = Want::kFile;
    return true;
  }
  UnknownJson& keys = in_metadata_ ? metadata_keys_ : top_keys_;
  if (!keys.add_sibling(key)) return fail(keys.code(), keys.reason());
  if (in_metadata_ && key == "total_size") {
    want_ = Want::kTotalSize;
  } else if (!in_metadata_ && key == "metadata") {
    want_ = Want::kMetadata;
  } else if (!in_metadata_ && key == "weight_map") {
    want_ = Want::kWeightMap;
  } else {
    skip_value();
  }
  return true;
}

bool IndexReader::start_object() {
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
    default:
      return unexpected("an object");
  }
}

bool IndexReader::end_object() {
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

}  // namespace moesaic::checkpoint
