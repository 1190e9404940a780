#include "checkpoint/config/gguf_architectures.h"

#include <fmt/format.h>

#include <array>
#include <vector>

#include "checkpoint/config/config.h"
#include "checkpoint/config/gguf_config.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// deepseek2 and Granite's: see gguf_model_type.
constexpr auto kArchitectures = std::to_array<GgufArchitecture>({
    {"llama", "mixtral", true},
    {"qwen2moe", "qwen2_moe", false, false, true},
    {"qwen3moe", "qwen3_moe", true, false, true},
    {"qwen3vlmoe", "qwen3_vl_moe_text", true},
    {"qwen3next", "qwen3_next", true},
    {"qwen35moe", "qwen3_5_moe_text", true},
    {"qwen4exp", "qwen4_exp_text", true},
    {"rnd1", "qwen3_moe", true},
    {"deepseek", "deepseek_v2"},
    {"deepseek2", "deepseek_v3"},
    {"deepseek2-ocr", "deepseek_v2"},
    {"deepseek32", "deepseek_v32"},
    {"deepseek4", "deepseek_v4", false, true},
    {"mistral4", "mistral4"},
    {"bailingmoe", "mistral4"},
    {"bailingmoe2", "sarvam_moe"},
    {"kimi-linear", "kimi_linear", true},
    {"glm4moe", "glm4_moe"},
    {"glm-dsa", "glm_moe_dsa"},
    {"glm5-next", "glm5_next_text", false, true},
    {"dots1", "dots1"},
    {"dots3note", "dots3_note_text"},
    {"minimax-01", "minimax_text_01", true},
    {"minimax-m2", "minimax_m2", true},
    {"minimax-m3", "minimax_m3_vl_text"},
    {"olmoe", "olmoe"},
    {"llada-moe", "olmoe"},
    {"mellum", "mellum", true},
    {"gpt-oss", "gpt_oss"},
    {"llama4", "llama4_text"},
    {"phimoe", "phimoe"},
    {"granitemoe", "granitemoe"},
    {"granitehybrid", "granitemoe"},
    {"granite_swa", "granitemoe_swa"},
    {"jamba", "jamba"},
    {"dbrx", "dbrx"},
    {"hunyuan-moe", "hunyuan_v1_moe", true},
    {"hy_v3", "hy_v3"},
    {"hy_v4", "hy_v4", false, true},
    {"ernie4_5-moe", "ernie4_5_moe", true},
    {"nemotron_h_moe", "nemotron_h"},
    {"lfm2moe", "lfm2_moe", true},
    {"afmoe", "afmoe"},
    {"laguna", "laguna"},
    {"exaone-moe", "exaone_moe"},
    {"mimo2", "mimo_v2_flash", true},
    {"step35", "step3p5", false, true},
    {"gemma4", "gemma4_text", true},
});

struct RefusedArchitecture {
  std::string_view name, reason;
};

constexpr auto kRefusedArchitectures = std::to_array<RefusedArchitecture>({
    {"cohere2moe", "its shared experts are averaged with the routed ones, not added"},
    {"grovemoe",
     "behind the experts follow further ones, one for each group of them, with their weights"},
    {"kimi-k3", "the experts work in a narrower space, between two projections"},
    {"smallthinker", "the router sees what the layer sees, before attention, not what experts see"},
});

// GLM-4.7-Flash, whose files of this architecture may not state the gating function. Its reference
// reader knows it by these numbers, and takes sigmoid there and softmax everywhere else.
Result<bool> is_glm_flash(const GgufMetadata& metadata) {
  constexpr std::int64_t kBlocks = 47, kVocabulary = 154880;  // and a block that predicts
  MOESAIC_ASSIGN_OR_RETURN(const auto blocks, metadata.integer("block_count", 1, kMaxLayers));
  const std::int64_t count = blocks.value_or(0);
  if (count < kBlocks || count > kBlocks + 1 || MOESAIC_FAULT(gguf_glm_flash_is_softmax)) {
    return false;
  }
  const Result<std::int64_t> vocabulary = metadata.vocabulary();
  return vocabulary.ok() && *vocabulary == kVocabulary;
}

}  // namespace

Result<const GgufArchitecture*> find_gguf_architecture(const GgufMetadata& metadata) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string name, metadata.string("general.architecture"));
  std::vector<std::string_view> known;
  for (const GgufArchitecture& architecture : kArchitectures) {
    if (architecture.name == name) return &architecture;
    known.push_back(architecture.name);
  }
  for (const RefusedArchitecture& refused : kRefusedArchitectures) {
    if (refused.name != name) continue;
    return metadata.bad(
        StatusCode::kUnsupported, "general.architecture",
        fmt::format("got {}, which is not supported: {}", quote_name(name), refused.reason));
  }
  const std::string nearest = similar_name(name, known);
  return metadata.bad(
      StatusCode::kUnsupported, "general.architecture",
      fmt::format("got {}, which is not supported; known are {}{}{}", quote_name(name),
                  fmt::join(known, ", "), nearest.empty() ? "" : "; nearest is ", nearest));
}

Result<std::string_view> gguf_model_type(const GgufMetadata& metadata,
                                         const GgufArchitecture& architecture,
                                         std::int64_t num_experts) {
  if (architecture.model_type == "granitemoe") {
    MOESAIC_ASSIGN_OR_RETURN(const auto shared,
                             metadata.integer("expert_shared_feed_forward_length", 0, kMaxWidth));
    const bool hybrid = architecture.name == "granitehybrid";
    if (shared.value_or(0) > 0) {
      return std::string_view(hybrid ? "granitemoehybrid" : "granitemoeshared");
    }
  }
  if (architecture.name != "deepseek2") return architecture.model_type;
  // The gating function tells softmax from sigmoid, renormalised softmax Mistral Large 3 from V2,
  // the grouping of experts (which older files do not state) V3 from Kimi-K2.
  MOESAIC_ASSIGN_OR_RETURN(const auto gating, metadata.integer("expert_gating_func", 0, 255));
  MOESAIC_ASSIGN_OR_RETURN(const auto renorm, metadata.boolean("expert_weights_norm"));
  bool sigmoid = gating == kGatingSigmoid;
  if (gating.value_or(0) == 0) {
    MOESAIC_ASSIGN_OR_RETURN(sigmoid, is_glm_flash(metadata));
  }
  if (!sigmoid) {
    return std::string_view(renorm.value_or(false) ? "mistral4" : "deepseek_v2");
  }
  constexpr std::int64_t kV3Experts = 256;
  return std::string_view(num_experts == kV3Experts ? "deepseek_v3" : "kimi_k2");
}

}  // namespace moesaic::checkpoint
