// Where config.json describes the language model: at the top, or inside a wrapper of several models.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

// A model_type whose file holds several models, and the type of its language model: what a nested
// object without a model_type is.
struct Wrapper {
  std::string_view type;
  std::string_view inner;
  bool may_be_flat = false;  // published files have the language model's fields at the top
};

struct LanguageModel {
  const nlohmann::json* object;
  const nlohmann::json* nested;  // the same where it is inside a wrapper, else null
  std::string where;             // begins every message about it
  std::string model_type;        // stated, or what the wrapper implies; empty: neither
  // The names that lead from the top to it, outermost first: {"thinker_config", "text_config"}.
  std::vector<std::string_view> path;
};

// An object of config.json that holds the language model, or is it, and what begins messages about it.
struct ConfigHolder {
  const nlohmann::json* object;
  std::string where;
};
// The top and the objects on the model's path, outermost first.
std::vector<ConfigHolder> holders_of(const nlohmann::json& top, const LanguageModel& model);

std::span<const Wrapper> wrappers();

// `top` is a JSON object and outlives the result. kCorruptFile: an object or a name that is none.
Result<LanguageModel> find_language_model(const nlohmann::json& top);

}  // namespace moesaic::checkpoint
