// The parts of a GGUF model.
#include <fmt/format.h>

#include <cctype>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/shards.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::int64_t kMaxParts = 99999;  // five digits in the name

Result<std::int64_t> split_value(const std::string& path, const GgufHeader& header,
                                 std::string_view key, std::int64_t unsaid) {
  const auto it = header.metadata.find(key);
  if (it == header.metadata.end()) return unsaid;
  if (const auto* value = std::get_if<std::int64_t>(&it->second)) return *value;
  return Status(StatusCode::kCorruptFile,
                fmt::format("{}: metadata \"{}\": got {}, need an integer", path, key,
                            gguf_kind_name(it->second)));
}

Status bad_split(const std::string& path, std::string_view key, std::int64_t got,
                 std::string_view need) {
  return {StatusCode::kCorruptFile,
          fmt::format("{}: metadata \"{}\": got {}, need {}", path, key, got, need)};
}

std::string part_suffix(std::int64_t part, std::int64_t count) {
  return fmt::format("-{:05}-of-{:05}.gguf", part, count);
}

}  // namespace

Result<ShardSet> ShardSet::open_gguf(const std::string& path, FileAccess access) {
  return guard_allocation(path, [&]() -> Result<ShardSet> {
    ShardSet set;
    std::int64_t num_tensors = 0;
    const auto add = [&](GgufFile file) {
      auto kept = std::make_shared<const GgufFile>(std::move(file));
      for (const TensorInfo& info : kept->tensors()) set.tensors_.push_back({kept.get(), &info});
      num_tensors += static_cast<std::int64_t>(kept->tensors().size());
      set.gguf_headers_.push_back(&kept->header());
      set.files_.push_back(std::move(kept));
    };
    MOESAIC_ASSIGN_OR_RETURN(GgufFile first, GgufFile::open(path, access));
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count,
                             split_value(path, first.header(), "split.count", 1));
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t number,
                             split_value(path, first.header(), "split.no", 0));
    if (count < 0 || count > kMaxParts) {
      return bad_split(path, "split.count", count, fmt::format("0 to {}", kMaxParts));
    }
    if (count > 1 && number != 0) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}: this is part {} of {} (split.no {}), need the first part",
                                path, number + 1, count, number));
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t promised,
                             split_value(path, first.header(), "split.tensors.count", -1));
    add(std::move(first));
    if (count > 1) {
      const std::string suffix = part_suffix(1, count);
      if (!path.ends_with(suffix)) {
        return Status(StatusCode::kCorruptFile,
                      fmt::format("{}: metadata \"split.count\" is {}: need a name that ends in {}",
                                  path, count, suffix));
      }
      const std::string stem = path.substr(0, path.size() - suffix.size());
      for (std::int64_t part = 2; part <= count; ++part) {
        const std::string name = stem + part_suffix(part, count);
        Result<GgufFile> file = GgufFile::open(name, access);
        if (!file.ok()) return file.status().with_context(path);
        MOESAIC_ASSIGN_OR_RETURN(const std::int64_t its_number,
                                 split_value(name, file->header(), "split.no", -1));
        MOESAIC_ASSIGN_OR_RETURN(const std::int64_t its_count,
                                 split_value(name, file->header(), "split.count", -1));
        if (its_number != part - 1) {
          return bad_split(name, "split.no", its_number, fmt::to_string(part - 1));
        }
        if (its_count != count) {
          return bad_split(name, "split.count", its_count, fmt::to_string(count));
        }
        add(std::move(file).value());
      }
    }
    if (promised >= 0 && count > 1 && promised != num_tensors) {
      return bad_split(path, "split.tensors.count", promised,
                       fmt::format("{}, as the parts hold", num_tensors));
    }
    MOESAIC_RETURN_IF_ERROR(set.sort_unindexed(path));
    MOESAIC_RETURN_IF_ERROR(set.sum_bytes(path));
    return set;
  });
}

}  // namespace moesaic::checkpoint
