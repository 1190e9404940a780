// Configurations that tests change field by field.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/config/config.h"

namespace moesaic::test {

using Json = nlohmann::json;

inline Json qwen3() {
  return {{"model_type", "qwen3_moe"}, {"hidden_size", 64},       {"moe_intermediate_size", 32},
          {"num_hidden_layers", 6},    {"num_experts", 8},        {"num_experts_per_tok", 2},
          {"dtype", "bfloat16"},       {"intermediate_size", 128}};
}

inline Json deepseek_v3() {
  return {{"model_type", "deepseek_v3"},   {"hidden_size", 7168},
          {"moe_intermediate_size", 2048}, {"num_hidden_layers", 61},
          {"n_routed_experts", 256},       {"num_experts_per_tok", 8},
          {"torch_dtype", "bfloat16"},     {"intermediate_size", 18432}};
}

inline checkpoint::ModelConfig parse(const Json& json) {
  Result<checkpoint::ModelConfig> config = checkpoint::parse_model_config(json.dump());
  EXPECT_TRUE(config.ok()) << config.status().to_string();
  return config.ok() ? *config : checkpoint::ModelConfig{};
}

// The first MoE layer; a default one (and a failed test) when there is none.
inline MoeLayerSpec first_layer(const Json& json) {
  const checkpoint::ModelConfig config = parse(json);
  EXPECT_FALSE(config.layers.empty());
  return config.layers.empty() ? MoeLayerSpec{} : config.layers[0];
}

inline std::vector<int> layers_of(const Json& json) {
  std::vector<int> layers;
  for (const MoeLayerSpec& spec : parse(json).layers) layers.push_back(spec.layer);
  return layers;
}

inline Json with(Json base, const Json& changes) {
  base.update(changes);
  return base;
}

inline Json without(Json base, std::initializer_list<const char*> keys) {
  for (const char* key : keys) base.erase(key);
  return base;
}

// The smallest model of a family.
inline Json small(const char* model_type, const Json& more) {
  return with({{"model_type", model_type},
               {"hidden_size", 16},
               {"intermediate_size", 8},
               {"num_hidden_layers", 4},
               {"num_local_experts", 4},
               {"num_experts_per_tok", 2}},
              more);
}

// What Kimi-Linear has to say, as published.
inline Json kimi_numbers() {
  return {
      {"first_k_dense_replace", 1}, {"num_shared_experts", 1}, {"routed_scaling_factor", 2.446}};
}

// The smallest DeepSeek-V4.
inline Json v4() {
  return small("deepseek_v4", {{"moe_intermediate_size", 8}, {"vocab_size", 11}});
}

}  // namespace moesaic::test
