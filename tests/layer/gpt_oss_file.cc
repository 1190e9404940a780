#include "layer/gpt_oss_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <utility>
#include <vector>

#include "moesaic/checkpoint.h"

namespace moesaic::test {

void write_gpt_oss(const TempDir& dir, std::int64_t width) {
  std::mt19937 generator(7);
  std::vector<std::pair<std::string, Tensor>> owned;
  const auto bytes = [&](const std::string& name, const Shape& shape, int from, int to) {
    Tensor t = Tensor::uninitialized(DType::kU8, shape).value();
    std::uniform_int_distribution<int> any(from, to);
    for (std::int64_t i = 0; i < t.bytes(); ++i) {
      t.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(any(generator));
    }
    owned.emplace_back("model.layers.0.mlp." + name, std::move(t));
  };
  const auto floats = [&](const std::string& name, const Shape& shape) {
    Tensor t = Tensor::uninitialized(DType::kF32, shape).value();
    std::normal_distribution<float> normal(0.0F, 0.2F);
    for (std::int64_t i = 0; i < t.bytes() / 4; ++i) t.as<float>()[i] = normal(generator);
    owned.emplace_back("model.layers.0.mlp." + name, std::move(t));
  };
  floats("router.weight", {kGptOssExperts, kGptOssHidden});
  floats("router.bias", {kGptOssExperts});
  bytes("experts.gate_up_proj_blocks", {kGptOssExperts, 2 * width, kGptOssHidden / 32, 16}, 0, 255);
  bytes("experts.gate_up_proj_scales", {kGptOssExperts, 2 * width, kGptOssHidden / 32}, 122, 124);
  floats("experts.gate_up_proj_bias", {kGptOssExperts, 2 * width});
  bytes("experts.down_proj_blocks", {kGptOssExperts, kGptOssHidden, width / 32, 16}, 0, 255);
  bytes("experts.down_proj_scales", {kGptOssExperts, kGptOssHidden, width / 32}, 118, 121);
  floats("experts.down_proj_bias", {kGptOssExperts, kGptOssHidden});
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : owned) tensors.push_back({name, tensor.view()});
  ASSERT_TRUE(write_safetensors(dir.path("model.safetensors"), tensors).ok());
  const nlohmann::json config = {{"model_type", "gpt_oss"},
                                 {"hidden_size", kGptOssHidden},
                                 {"intermediate_size", width},
                                 {"num_hidden_layers", 1},
                                 {"num_local_experts", kGptOssExperts},
                                 {"num_experts_per_tok", 2},
                                 {"torch_dtype", "bfloat16"},
                                 {"quantization_config", {{"quant_method", "mxfp4"}}}};
  write_bytes(dir.path("config.json"), config.dump());
}

}  // namespace moesaic::test
