#include "checkpoint/families.h"

#include <fmt/format.h>

#include <cctype>

namespace moesaic {
namespace {

// --- expert layouts -----------------------------------------------------------------------------

constexpr ExpertLayout per_expert(std::string_view block, std::string_view gate,
                                  std::string_view up, std::string_view down) {
  ExpertLayout layout;
  layout.storage = ExpertStorage::kPerExpert;
  layout.block = block;
  layout.gate = gate;
  layout.up = up;
  layout.down = down;
  layout.weight_suffixes = {".weight"};
  layout.scale_suffix = ".weight_scale_inv";
  return layout;
}

constexpr ExpertLayout projections(std::string_view block) {
  return per_expert(block, "experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj");
}

constexpr ExpertLayout w123(std::string_view block) {
  return per_expert(block, "experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2");
}

// The stacked form that recent exports keep: the same modules as in memory, not split again.
constexpr ExpertLayout fused(ExpertStorage storage, std::string_view block) {
  ExpertLayout layout;
  layout.storage = storage;
  layout.block = block;
  layout.gate = "experts.gate_up_proj";
  layout.down = "experts.down_proj";
  layout.weight_suffixes = {"", ".weight"};
  layout.scale_suffix = "_scale_inv";
  return layout;
}

constexpr ExpertLayout fused_nt(std::string_view block) {
  return fused(ExpertStorage::kFusedNT, block);
}

constexpr ExpertLayout gpt_oss_layout() {
  ExpertLayout layout = fused(ExpertStorage::kFusedNNInterleaved, "mlp");
  layout.weight_suffixes = {""};
  layout.bias_suffix = "_bias";
  return layout;
}

// --- families -----------------------------------------------------------------------------------

constexpr Family mixtral() {
  Family f;
  f.title = "Mixtral";
  f.model_types = {"mixtral"};
  f.width_fields = {"intermediate_size"};
  f.routing.renorm = RenormRule::kAlways;
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), fused_nt("block_sparse_moe")};
  return f;
}

constexpr Family qwen3_moe() {
  Family f;
  f.title = "Qwen3-MoE";
  f.model_types = {"qwen3_moe"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kSparseStep;
  f.routing.renorm = RenormRule::kNormTopkProb;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

constexpr Family qwen2_moe() {
  Family f = qwen3_moe();
  f.title = "Qwen2-MoE";
  f.model_types = {"qwen2_moe"};
  f.shared = SharedRule::kOwnWidth;
  f.shared_module = "shared_expert";
  f.shared_gate = "shared_expert_gate.weight";
  return f;
}

constexpr Family olmoe() {
  Family f = qwen3_moe();
  f.title = "OLMoE";
  f.model_types = {"olmoe"};
  f.width_fields = {"intermediate_size"};
  f.layer_rule = LayerRule::kEvery;
  return f;
}

constexpr Family deepseek_v2() {
  Family f;
  f.title = "DeepSeek-V2";
  f.model_types = {"deepseek_v2"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.routing.reads_scoring_func = true;
  f.routing.renorm = RenormRule::kNormTopkProb;
  f.routing.bias = BiasRule::kTopkMethod;
  f.routing.default_topk_method = "greedy";
  f.routing.reads_groups = true;
  f.routing.scale = ScaleRule::kUnlessRenormalized;
  f.shared = SharedRule::kCount;
  f.correction_bias = {"gate.e_score_correction_bias"};
  f.shared_module = "shared_experts";
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

constexpr Family deepseek_v3() {
  Family f = deepseek_v2();
  f.title = "DeepSeek-V3";
  f.model_types = {"deepseek_v3", "deepseek_v32"};
  f.default_first_dense = 3;
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.default_norm_topk_prob = true;
  f.routing.default_topk_method = "noaux_tc";
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.scale = ScaleRule::kAlways;
  f.routing.default_scale = 2.5;
  f.default_shared_count = 1;
  return f;
}

constexpr Family kimi_k2() {
  Family f = deepseek_v3();
  f.title = "Kimi-K2";
  f.model_types = {"kimi_k2"};
  f.default_first_dense = 1;
  f.routing.default_n_group = 1;
  f.routing.default_topk_group = 1;
  f.routing.default_scale = 2.827;
  return f;
}

constexpr Family glm4_moe() {
  Family f = kimi_k2();
  f.title = "GLM-4.5";
  f.model_types = {"glm4_moe", "glm4v_moe_text"};
  f.routing.reads_scoring_func = false;
  f.routing.bias = BiasRule::kAlways;
  f.routing.default_topk_method = "";
  f.routing.default_scale = 1.0;
  return f;
}

constexpr Family minimax_m2() {
  Family f;
  f.title = "MiniMax-M2";
  f.model_types = {"minimax_m2"};
  f.width_fields = {"intermediate_size"};
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.reads_scoring_func = true;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.bias = BiasRule::kUseRoutingBias;
  f.routing.scale = ScaleRule::kAlways;
  f.correction_bias = {"e_score_correction_bias", "gate.e_score_correction_bias"};
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), fused_nt("block_sparse_moe")};
  return f;
}

constexpr Family gpt_oss() {
  Family f;
  f.title = "gpt-oss";
  f.model_types = {"gpt_oss"};
  f.width_fields = {"intermediate_size"};
  f.routing.method = RoutingMethod::kTopKSoftmax;
  // hidden_act says "silu" in these files; the activation is fixed by the family.
  f.reads_hidden_act = false;
  f.activation = {ActivationKind::kSwigluOai, 7.0F, 1.702F, 1.0F, 0.0F};
  f.gate_weight = "router.weight";
  f.gate_bias = "router.bias";
  f.layouts = {gpt_oss_layout()};
  return f;
}

constexpr std::array<Family, 10> kFamilies = {
    mixtral(), qwen2_moe(), qwen3_moe(),  deepseek_v2(), deepseek_v3(),
    kimi_k2(), glm4_moe(),  minimax_m2(), olmoe(),       gpt_oss(),
};

constexpr std::array<std::string_view, 3> kLayerPrefixes = {
    "model.layers.",
    "language_model.model.layers.",  // Kimi-VL, Llama4 style wrappers
    "model.language_model.layers.",  // GLM-4.5V, Qwen3-VL style wrappers
};

constexpr std::array<std::string_view, 4> kExpertCount = {"num_experts", "num_local_experts",
                                                          "n_routed_experts", "moe_num_experts"};
constexpr std::array<std::string_view, 6> kTopK = {"num_experts_per_tok",
                                                   "num_experts_per_token",
                                                   "experts_per_token",
                                                   "moe_topk",
                                                   "moe_k",
                                                   "moe_top_k"};

constexpr std::string_view kExpertMark = "{e}";

}  // namespace

std::span<const Family> families() { return kFamilies; }

const Family* find_family(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    for (const std::string_view name : family.model_types.list()) {
      if (name == model_type) return &family;
    }
  }
  return nullptr;
}

std::vector<std::string_view> known_model_types() {
  std::vector<std::string_view> types;
  for (const Family& family : kFamilies) {
    for (const std::string_view name : family.model_types.list()) types.push_back(name);
  }
  return types;
}

std::span<const std::string_view> layer_prefixes() { return kLayerPrefixes; }
std::span<const std::string_view> expert_count_fields() { return kExpertCount; }
std::span<const std::string_view> top_k_fields() { return kTopK; }

std::string expand_expert(std::string_view pattern, std::int64_t expert) {
  const std::size_t at = pattern.find(kExpertMark);
  if (at == std::string_view::npos) return std::string(pattern);
  return fmt::format("{}{}{}", pattern.substr(0, at), expert,
                     pattern.substr(at + kExpertMark.size()));
}

bool matches_pattern(std::string_view pattern, std::string_view name) {
  const std::size_t at = pattern.find(kExpertMark);
  if (at == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, at))) return false;
  std::string_view rest = name.substr(at);
  std::size_t digits = 0;
  while (digits < rest.size() && std::isdigit(static_cast<unsigned char>(rest[digits])) != 0) {
    ++digits;
  }
  return digits > 0 && rest.substr(digits) == pattern.substr(at + kExpertMark.size());
}

}  // namespace moesaic
