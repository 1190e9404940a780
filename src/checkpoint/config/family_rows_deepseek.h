// Rows of the table of families: DeepSeek-V2 and V3 and models made from them.
#pragma once

#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"

namespace moesaic::checkpoint {

inline constexpr std::string_view kScoringReadings =
    "the models' own code stops, transformers computes with sigmoid or softmax as the family has "
    "it, vLLM computes what the field says";
inline constexpr std::string_view kMethodReadings =
    "the models' own code stops, transformers always selects with groups and a bias, vLLM follows "
    "the field";

inline constexpr std::string_view kSharedReadings =
    "the models' own code then has no shared experts, transformers has two";

constexpr Family deepseek_v2() {
  Family f;
  f.title = "DeepSeek-V2";
  f.model_types = {"deepseek_v2"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.routing.bias = BiasRule::kTopkMethod;
  f.routing.default_topk_method = "greedy";
  f.routing.reads_groups = true;
  f.routing.scale = ScaleRule::kAlways;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "n_shared_experts";
  f.shared_unsaid = kSharedReadings;
  f.correction_bias = {"gate.e_score_correction_bias"};
  f.shared_layout = kSharedExperts;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  f.assumed = {
      {"norm_topk_prob", "false",
       "transformers scales the weights and never renormalises, the models' own code renormalises "
       "and then does not scale (but a single weight), vLLM renormalises and scales"},
      {"scoring_func", "\"softmax\"", kScoringReadings},
      {"n_group", ""},  // of topk_method "greedy"
      {"topk_group", ""},
  };
  return f;
}

constexpr Family deepseek_ocr2() {
  Family f = deepseek_v2();
  f.title = "DeepSeek-OCR-2";
  f.model_types = {"deepseek_ocr2_text"};
  f.has_layer_types = true;
  return f;
}

constexpr Family unlimited_ocr() {
  Family f = deepseek_ocr2();
  f.title = "Unlimited-OCR";
  f.model_types = {"unlimited_ocr_text"};
  f.default_first_dense = 1;
  return f;
}

constexpr Family deepseek_v3() {
  Family f = deepseek_v2();
  f.title = "DeepSeek-V3";
  f.model_types = {"deepseek_v3"};
  f.default_first_dense = 3;
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.routing.bias = BiasRule::kAlways;
  f.routing.default_topk_method = "";
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.scale = ScaleRule::kAlways;
  f.routing.default_scale = 2.5;
  f.default_shared_count = 1;
  f.shared_unsaid = "";
  f.assumed = {
      {"scoring_func", "\"sigmoid\"", kScoringReadings},
      {"topk_method", "\"noaux_tc\"", kMethodReadings},
  };
  return f;
}

constexpr Family deepseek_v32() {
  Family f = deepseek_v3();
  f.title = "DeepSeek-V3.2";
  f.model_types = {"deepseek_v32"};
  f.has_layer_types = true;
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
  f.routing.default_scale = 1.0;
  f.assumed = {{"topk_method", "\"noaux_tc\""}};
  return f;
}

constexpr Family glm4_moe_lite() {
  Family f = glm4_moe();
  f.title = "GLM-4.7-Flash";
  f.model_types = {"glm4_moe_lite"};
  f.has_layer_types = true;
  f.routing.default_scale = 1.8;
  return f;
}

constexpr Family glm_moe_dsa() {
  Family f = glm4_moe();
  f.title = "GLM-5";
  f.model_types = {"glm_moe_dsa"};
  f.has_layer_types = true;
  f.default_first_dense = 3;
  f.routing.default_scale = 2.5;
  return f;
}

constexpr Family dots1() {
  Family f = glm4_moe();
  f.title = "dots.llm1";
  f.model_types = {"dots1"};
  f.default_first_dense = 0;
  f.default_shared_count = 0;
  f.routing.default_renorm = false;
  f.assumed.add({{"scoring_func", "\"sigmoid\"|\"noaux_tc\""}});
  return f;
}

}  // namespace moesaic::checkpoint
