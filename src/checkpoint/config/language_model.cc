// Source: the configurations of transformers 5.24, each of which has a default for its parts.
#include "checkpoint/config/language_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/config/config_fields.h"

namespace moesaic::checkpoint {
namespace {

constexpr auto kWrappers = std::to_array<Wrapper>({
    {"aria", "aria_text"},
    {"deepseek_ocr2", "deepseek_ocr2_text"},
    {"diffusion_gemma", "diffusion_gemma_text"},
    {"dots3_note", "dots3_note_text", true},
    {"ernie4_5_vl_moe", "ernie4_5_vl_moe_text"},
    {"gemma4", "gemma4_text"},
    {"glm4v_moe", "glm4v_moe_text"},
    {"glm5_next", "glm5_next_text", true},
    {"hy_v4_vl", "hy_v4_vl_text"},
    {"inkling2", "inkling2_text"},
    {"inkling2_loop", "inkling2_loop_text"},
    {"inkling_mm_model", "inkling_text"},
    {"kimi_k25", "deepseek_v3"},
    {"llama4", "llama4_text"},
    {"minimax_m3_vl", "minimax_m3_vl_text"},
    {"mistral_large4", "mistral_large4_text"},
    {"muse_spark", "muse_spark_text"},
    {"nemotron_h_omni", "nemotron_h"},
    {"qwen3_5_moe", "qwen3_5_moe_text"},
    {"qwen3_omni_moe", "qwen3_omni_moe_thinker"},
    {"qwen3_omni_moe_talker", "qwen3_omni_moe_talker_text"},
    {"qwen3_omni_moe_thinker", "qwen3_omni_moe_text"},
    {"qwen3_vl_moe", "qwen3_vl_moe_text"},
    {"qwen4_exp", "qwen4_exp_text"},
    {"step3p7", "step3p5"},
    {"unlimited-ocr", "unlimited_ocr_text"},
    {"unlimited_ocr", "unlimited_ocr_text"},
});

const Wrapper* find_wrapper(std::string_view type) {
  const auto* const found = std::find_if(kWrappers.begin(), kWrappers.end(),
                                         [&](const Wrapper& w) { return w.type == type; });
  return found == kWrappers.end() ? nullptr : found;
}

// Unlimited-OCR's own files: another name for text_config, in which the model calls itself what it
// was made from.
bool is_unlimited_ocr(std::string_view type) {
  return type == "unlimited-ocr" || type == "unlimited_ocr";
}

Status step_into(std::string_view name, LanguageModel* model) {
  const ConfigFields fields(*model->object, model->where);
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* nested, fields.object(name));
  if (nested == nullptr) return {};
  const std::string outer = model->model_type;
  std::vector<std::string_view> path = std::move(model->path);
  path.push_back(name);
  *model = {nested, nested, fmt::format("{}: {}", model->where, name), {}, std::move(path)};
  MOESAIC_ASSIGN_OR_RETURN(const auto stated,
                           ConfigFields(*nested, model->where).string("model_type"));
  const Wrapper* wrapper = find_wrapper(outer);
  const bool renamed = is_unlimited_ocr(outer) && stated.value_or("") == "deepseek_v2";
  if (stated && !renamed) {
    model->model_type = *stated;
  } else if (wrapper != nullptr) {
    model->model_type = wrapper->inner;
  }
  return {};
}

}  // namespace

std::span<const Wrapper> wrappers() { return kWrappers; }

std::vector<ConfigHolder> holders_of(const nlohmann::json& top, const LanguageModel& model) {
  std::vector<ConfigHolder> holders = {{&top, "config.json"}};
  for (const std::string_view name : model.path) {
    const ConfigHolder& outer = holders.back();
    holders.push_back(
        {&outer.object->at(std::string(name)), fmt::format("{}: {}", outer.where, name)});
  }
  return holders;
}

// Multimodal wrappers nest the language model under text_config; models that also speak nest both
// of it under thinker_config.
Result<LanguageModel> find_language_model(const nlohmann::json& top) {
  LanguageModel model{&top, nullptr, "config.json", {}, {}};
  MOESAIC_ASSIGN_OR_RETURN(const auto type, ConfigFields(top, model.where).string("model_type"));
  model.model_type = type.value_or("");
  for (const std::string_view name : {"thinker_config", "text_config"}) {
    MOESAIC_RETURN_IF_ERROR(step_into(name, &model));
  }
  if (model.nested != nullptr) return model;
  if (is_unlimited_ocr(model.model_type)) {
    MOESAIC_RETURN_IF_ERROR(step_into("language_config", &model));
    return model;
  }
  const Wrapper* wrapper = find_wrapper(model.model_type);
  if (wrapper != nullptr && wrapper->may_be_flat) model.model_type = wrapper->inner;
  return model;
}

}  // namespace moesaic::checkpoint
