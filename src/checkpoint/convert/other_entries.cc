#include "checkpoint/convert/other_entries.h"

#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "checkpoint/container/json_strict.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 2> kMaps = {"quantized_layers", "extra_config"};
constexpr std::array<const char*, 5> kLists = {"ignore", "exclude_modules", "ignored_layers",
                                               "modules_to_not_convert", "llm_int8_skip_modules"};

}  // namespace

Json without_entries_of(Json description, const std::vector<std::string>& modules) {
  if (MOESAIC_FAULT(convert_keeps_entries_of_experts)) return description;
  const std::unordered_set<std::string_view> named(modules.begin(), modules.end());
  const auto inside = [&](std::string_view entry) {
    for (std::size_t end = entry.find('.'); end != entry.npos; end = entry.find('.', end + 1)) {
      if (named.contains(entry.substr(0, end))) return true;
    }
    return named.contains(entry);
  };
  for (const char* key : kMaps) {
    const auto map = description.find(key);
    if (map == description.end() || !map->is_object()) continue;
    Json kept = Json::object();
    for (auto& [name, value] : map->get_ref<Json::object_t&>()) {
      if (!inside(name)) append_member(&kept, name, std::move(value));
    }
    if (kept.empty() && !map->empty()) {
      auto& [name, value] = map->get_ref<Json::object_t&>().front();
      append_member(&kept, name, std::move(value));
    }
    *map = std::move(kept);
  }
  for (const char* key : kLists) {
    const auto list = description.find(key);
    if (list == description.end() || !list->is_array()) continue;
    Json kept = Json::array();
    for (Json& entry : *list) {
      if (!entry.is_string() || !inside(entry.get_ref<const std::string&>())) {
        kept.push_back(std::move(entry));
      }
    }
    *list = std::move(kept);
  }
  return description;
}

}  // namespace moesaic::checkpoint
