// What a WeightLoader takes, refuses and keeps: docs/spec/checkpoints.md section 6.5. The rules of the
// decision list in section 6.2 and their cases:
//   1   MXFP4 of all experts                       uneven_slices_test.cc, PushedFormats
//   2   not local: false                           TensorsOfOthersAreAnsweredWithFalse
//       numbers of all experts                     NumbersThatDecideForAllRanksAreAskedForOnEvery
//   3   packed words, transposed                   PushedFormats (GPTQ, AWQ, compressed-tensors)
//   4   w1, w2, w3                                 UnknownTensorsOfTheBlockAreNamed (w4)
//   5   GGUF types                                 PushedFormats (gguf_*)
//   6   bitsandbytes                               PushedFormats (bnb_*)
//   7   slices, rank 3, fused and transposed       HandMadeLayers (hand_made_layers_test.cc), PushedTensors...
//   8   input scales                               NumbersThatDecide..., PushedFormats
//   9   group indices                              PushedFormats (act-order)
//   10  ModelOpt, one tensor or [E, 2]             PushedFormats (modelopt_*, stacked_*)
//   11  scales and zeros of every granularity      PushedFormats
//   12  weight_shape                               PushedFormats (pack-quantized)
//   13  weights                                    all
//   14  everything else: biases are kept, other names refused: UnknownTensorsOfTheBlockAreNamed
// PushedFormats and PushedTensorsGiveTheBitsOfTheFile are in weight_loader_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/pushing.h"
#include "checkpoint/small_layer.h"
#include "moesaic/convert.h"
#include "moesaic/weight_loader.h"
#include "support/source_folder.h"

namespace moesaic::test {
namespace {

const std::string kBlock = "model.layers.2.block_sparse_moe.";

Tensor counting(DType dtype, const Shape& shape, int start) {
  Tensor t = Tensor::uninitialized(dtype, shape).value();
  const std::int64_t count = shape.num_elements().value();
  for (std::int64_t i = 0; i < count; ++i) {
    if (dtype == DType::kF32) t.as<float>()[i] = static_cast<float>(start) + static_cast<float>(i);
    if (dtype == DType::kU8) t.as<std::uint8_t>()[i] = static_cast<std::uint8_t>((start + i) % 97);
  }
  return t;
}

std::string expert_tensor(std::int64_t e, const std::string& leaf) {
  return kBlock + "experts." + std::to_string(e) + "." + leaf;
}

// A Mixtral with three layers, of which the tests load the last.
std::vector<StoredTensor> mixtral() {
  std::vector<StoredTensor> all;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const int base = 1000 * static_cast<int>(e);
    all.push_back({expert_tensor(e, "w1.weight"), counting(DType::kF32, {kWidth, kHidden}, base)});
    all.push_back(
        {expert_tensor(e, "w3.weight"), counting(DType::kF32, {kWidth, kHidden}, base + 100)});
    all.push_back(
        {expert_tensor(e, "w2.weight"), counting(DType::kF32, {kHidden, kWidth}, base + 200)});
  }
  all.push_back({kBlock + "gate.weight", counting(DType::kF32, {kExperts, kHidden}, 7)});
  return all;
}

std::string mixtral_config(const nlohmann::json& extra = nlohmann::json::object()) {
  nlohmann::json config = {{"model_type", "mixtral"},       {"hidden_size", kHidden},
                           {"intermediate_size", kWidth},   {"num_hidden_layers", 3},
                           {"num_local_experts", kExperts}, {"num_experts_per_tok", 2}};
  config.update(extra);
  return config.dump();
}

WeightLoader mixtral_loader(const WeightLoader::Options& options = {}) {
  Result<WeightLoader> loader = WeightLoader::from_config(mixtral_config(), 2, options);
  EXPECT_TRUE(loader.ok()) << loader.status().to_string();
  return std::move(*loader);
}

const StoredTensor& find(const std::vector<StoredTensor>& all, const std::string& name) {
  for (const StoredTensor& t : all) {
    if (t.name == name) return t;
  }
  throw std::out_of_range(name);
}

// --- what is missing, twice or misshapen ---

TEST(WeightLoaderRules, APartialSetIsRefusedAndMayBeCompleted) {
  const auto all = mixtral();
  WeightLoader loader = mixtral_loader();
  const std::string lacking = expert_tensor(3, "w3.weight");
  ASSERT_TRUE(push(loader, all, 1, [&](const std::string& n) { return n != lacking; }).ok());
  EXPECT_EQ(loader.missing().value(), std::vector<std::string>{lacking});
  EXPECT_EQ(mismatch(loader.finish().status(), StatusCode::kMissingTensor,
                     {lacking, "1 of 4 experts", "expert 3: 2 of 3"}),
            "");
  const Result<bool> late = loader.load(lacking, find(all, lacking).tensor.view());
  ASSERT_TRUE(late.ok()) << late.status().to_string();
  EXPECT_TRUE(*late);
  EXPECT_TRUE(loader.missing()->empty());
  EXPECT_TRUE(loader.finish().ok());
}

TEST(WeightLoaderRules, NothingAtAllIsNamed) {
  const WeightLoader loader = mixtral_loader();
  EXPECT_EQ(loader.missing()->size(), 3 * kExperts + 1);
  EXPECT_EQ(loader.bytes(), 0);
}

TEST(WeightLoaderRules, ADoubledTensorIsNamed) {
  const auto all = mixtral();
  // The second is another rank's, and known to have come all the same.
  WeightLoader loader = mixtral_loader(ranks(1, 0, 2, 0));
  for (const char* leaf : {"w1.weight", "w2.weight"}) {
    for (const std::int64_t e : {0, 3}) {
      const std::string name = expert_tensor(e, leaf);
      EXPECT_EQ(loader.load(name, find(all, name).tensor.view()).value(), e == 0);
      EXPECT_EQ(mismatch(loader.load(name, find(all, name).tensor.view()).status(),
                         StatusCode::kInvalidArgument, {name, "twice"}),
                "");
    }
  }
}

TEST(WeightLoaderRules, AMisshapenTensorIsNamedAndMayFollowInOrder) {
  const auto all = mixtral();
  for (const auto& [tp, ep] : {std::pair(1, 1), std::pair(2, 1), std::pair(1, 2)}) {
    WeightLoader loader = mixtral_loader(ranks(tp, tp - 1, ep, 0));
    struct Case {
      std::string leaf;
      DType dtype;
      Shape shape;
      StatusCode code;
      std::vector<std::string> words;
    };
    const std::vector<Case> cases = {
        {"w1.weight",
         DType::kF32,
         {kWidth + 1, kHidden},
         StatusCode::kInvalidShape,
         {"[9, 6]", "[8, 6]"}},
        {"w1.weight", DType::kF32, {1, kHidden}, StatusCode::kInvalidShape, {"[1, 6]"}},
        {"w3.weight", DType::kF32, {kHidden, kWidth}, StatusCode::kInvalidShape, {"[6, 8]"}},
        {"w2.weight", DType::kF32, {kHidden, kWidth, 1}, StatusCode::kInvalidShape, {"[6, 8, 1]"}},
        {"w2.weight",
         DType::kU8,
         {kHidden, kWidth},
         StatusCode::kInvalidDType,
         {"U8", "need BF16"}}};            // what was refused before, of F32, told nothing
    for (const std::int64_t e : {0, 3}) {  // of this rank and of the other
      for (const Case& c : cases) {
        const std::string name = expert_tensor(e, c.leaf);
        const Tensor wrong = Tensor::zeros(c.dtype, c.shape).value();
        std::vector<std::string> words = c.words;
        words.push_back(name);
        EXPECT_EQ(mismatch(loader.load(name, wrong.view()).status(), c.code, words), "");
      }
    }
    EXPECT_EQ(loader.bytes(), 0);
    EXPECT_TRUE(push(loader, all, 5).ok());
    EXPECT_TRUE(loader.finish().ok());
  }
}

TEST(WeightLoaderRules, ViewsThatCannotBeReadAreRefused) {
  WeightLoader loader = mixtral_loader();
  const std::string name = expert_tensor(0, "w1.weight");
  const Tensor t = counting(DType::kF32, {kHidden, kWidth}, 0);
  ConstTensorView turned = t.view();
  turned.shape = {kWidth, kHidden};
  turned.strides = {1, kWidth};
  EXPECT_EQ(mismatch(loader.load(name, turned).status(), StatusCode::kInvalidLayout, {name}), "");
  const ConstTensorView none(nullptr, DType::kF32, {kWidth, kHidden});
  EXPECT_EQ(mismatch(loader.load(name, none).status(), StatusCode::kInvalidArgument, {name}), "");
  EXPECT_EQ(mismatch(loader.load(name, t.view(), 16).status(), StatusCode::kUnsupported,
                     {name, "GGUF type 16"}),
            "");
}

// --- what is not local ---

TEST(WeightLoaderRules, TensorsOfOthersAreAnsweredWithFalse) {
  const auto all = mixtral();
  WeightLoader loader = mixtral_loader(ranks(1, 0, 4, 2));
  const Tensor any = counting(DType::kF32, {3, 3}, 0);
  for (const std::string& name :
       {std::string("model.embed_tokens.weight"), std::string("lm_head.weight"),
        std::string("model.layers.1.block_sparse_moe.experts.0.w1.weight"),
        std::string("model.layers.22.block_sparse_moe.gate.weight"),
        std::string("model.layers.2.self_attn.q_proj.weight")}) {
    EXPECT_FALSE(loader.load(name, any.view()).value()) << name;
    EXPECT_FALSE(loader.load(name, any.view()).value()) << "again: " << name;
  }
  std::vector<int> answers;
  ASSERT_TRUE(push(loader, all, 3, {}, &answers).ok());
  std::int64_t local = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool mine = all[i].name.find("experts.2.") != std::string::npos ||
                      all[i].name.find("experts.") == std::string::npos;
    EXPECT_EQ(answers[i], mine ? 1 : 0) << all[i].name;
    if (mine) local += all[i].tensor.bytes();
  }
  EXPECT_EQ(loader.bytes(), local);
  // Memory of a GPU that is none is not looked at.
  WeightLoader other = mixtral_loader(ranks(1, 0, 4, 2));
  for (const std::string& name : {expert_tensor(1, "w1.weight"), kBlock + "experts.0.w3.weight",
                                  std::string("model.layers.1.block_sparse_moe.gate.weight")}) {
    const ConstTensorView device(any.data(), DType::kF32, {kWidth, kHidden}, Device::cuda(0));
    const Result<bool> kept = other.load(name, device);
    EXPECT_TRUE(kept.ok() && !*kept) << name;
  }
  EXPECT_TRUE(other.looks_at(expert_tensor(1, "w1.weight")));
  EXPECT_FALSE(other.looks_at("model.layers.1.block_sparse_moe.gate.weight"));
}

TEST(WeightLoaderRules, UnknownTensorsOfTheBlockAreNamed) {
  const Tensor any = counting(DType::kF32, {3, 3}, 0);
  const std::vector<std::pair<std::string, StatusCode>> unknown = {
      {kBlock + "experts.0.w4.weight", StatusCode::kUnsupported},
      {expert_tensor(kExperts, "w1.weight"), StatusCode::kCorruptFile}};
  for (const auto& [name, code] : unknown) {
    WeightLoader loader = mixtral_loader();
    ASSERT_TRUE(push(loader, mixtral(), 2).ok());
    ASSERT_TRUE(loader.load(name, any.view()).ok());
    EXPECT_EQ(mismatch(loader.finish().status(), code, {name, "not recognised"}), "");
  }
}

// An engine that knows which experts are its own need not show the others'.
TEST(WeightLoaderRules, OnlyLocalExpertsAreAskedFor) {
  const auto all = mixtral();
  WeightLoader::Options options = ranks(1, 0, 2, 1);
  WeightLoader whole = mixtral_loader(options), part = mixtral_loader(options);
  ASSERT_TRUE(push(whole, all, 1).ok());
  ASSERT_TRUE(push(part, all, 9, [](const std::string& name) {
                return name.find("experts.0.") == name.npos && name.find("experts.1.") == name.npos;
              }).ok());
  EXPECT_EQ(whole.bytes(), part.bytes());
  MoeLayerWeights a = whole.finish().value(), b = part.finish().value();
  EXPECT_EQ(weights_difference(a, b, 2), "");
}

TEST(WeightLoaderRules, ARankKeepsItsSliceOnly) {
  const auto all = mixtral();
  std::int64_t experts = 0, gate = 0;
  for (const StoredTensor& t : all) {
    (t.name.find("experts.") != std::string::npos ? experts : gate) += t.tensor.bytes();
  }
  for (const int tp : {1, 2, 4}) {
    WeightLoader loader = mixtral_loader(ranks(tp, tp - 1, 1, 0));
    ASSERT_TRUE(push(loader, all, 4).ok());
    EXPECT_EQ(loader.bytes(), experts / tp + gate);
  }
}

// --- copies, names, layers of the caller's own ---

TEST(WeightLoaderRules, SeveralPhysicalCopiesOfAnExpert) {
  const auto all = mixtral();
  WeightLoader::Options options = ranks(1, 0, 2, 1);
  options.physical_to_logical = {0, 1, 2, 3, 1, 3};  // rank 1: slots 3, 4, 5
  WeightLoader loader = mixtral_loader(options);
  std::vector<int> answers;
  ASSERT_TRUE(push(loader, all, 8, {}, &answers).ok());
  for (std::size_t i = 0; i + 1 < all.size(); ++i) {
    const bool mine = i / 3 == 1 || i / 3 == 3;
    EXPECT_EQ(answers[i], mine ? 1 : 0) << all[i].name;
  }
  MoeLayerWeights got = loader.finish().value();
  const std::vector<std::int64_t> logical = {3, 1, 3};
  for (std::int64_t slot = 0; slot < 3; ++slot) {
    const ExpertWeightsView v = got.experts->expert(slot).value();
    const std::string name = expert_tensor(logical[static_cast<std::size_t>(slot)], "w2.weight");
    EXPECT_EQ(floats(v.w2), floats(find(all, name).tensor.view())) << slot;
  }
  EXPECT_FALSE(got.experts->expert(3).ok());
  options.physical_to_logical = {0, 1, 2, 4};
  EXPECT_EQ(mismatch(WeightLoader::from_config(mixtral_config(), 2, options).status(),
                     StatusCode::kInvalidArgument, {"physical_to_logical[3]", "got expert 4"}),
            "");
}

TEST(WeightLoaderRules, NamesMayGetABeginning) {
  WeightLoader::Options options;
  options.names = {{"", "model.layers.2."}};
  WeightLoader loader = mixtral_loader(options);
  std::vector<StoredTensor> renamed = mixtral();
  for (StoredTensor& t : renamed) t.name.erase(0, std::strlen("model.layers.2."));
  ASSERT_TRUE(push(loader, renamed, 2).ok());
  EXPECT_EQ(loader.missing().value(), std::vector<std::string>());
}

TEST(WeightLoaderRules, NamesAreReplacedBeforeTheyAreLookedUp) {
  WeightLoader::Options options;
  options.names = {{"transformer.", "model."}, {"base_layer.", ""}, {"ffn.", "block_sparse_moe."}};
  WeightLoader loader = mixtral_loader(options);
  std::vector<StoredTensor> renamed = mixtral();
  for (StoredTensor& t : renamed) {
    t.name.replace(0, 5, "transformer");
    const std::size_t at = t.name.find("block_sparse_moe");
    t.name.replace(at, std::strlen("block_sparse_moe"), "ffn");
    t.name.replace(t.name.rfind("weight"), 6, "base_layer.weight");
  }
  const Tensor wrong = counting(DType::kF32, {2, 2}, 0);
  EXPECT_EQ(mismatch(loader.load(renamed[0].name, wrong.view()).status(), StatusCode::kInvalidShape,
                     {renamed[0].name, mixtral()[0].name}),
            "");
  ASSERT_TRUE(push(loader, renamed, 2).ok());
  MoeLayerWeights got = loader.finish().value();
  WeightLoader plain = mixtral_loader();
  ASSERT_TRUE(push(plain, mixtral(), 2).ok());
  MoeLayerWeights want = plain.finish().value();
  EXPECT_EQ(weights_difference(got, want, kExperts), "");
}

TEST(WeightLoaderRules, RouterAndSharedExpertsMayBeTheCallers) {
  WeightLoader::Options options;
  options.experts_only = true;
  WeightLoader loader = mixtral_loader(options);
  std::vector<int> answers;
  ASSERT_TRUE(push(loader, mixtral(), 1, {}, &answers).ok());
  EXPECT_EQ(answers.back(), 0);  // the gate
  const MoeLayerWeights got = loader.finish().value();
  EXPECT_FALSE(got.tensors.gate_weight.present());
  EXPECT_EQ(got.spec.num_experts, kExperts);
}

// Where the first tensors do not tell how the experts are stored.
TEST(WeightLoaderRules, ARouterMayComeBeforeExpertsThatAreAskedForAlone) {
  const TempDir folder;
  const std::string path = folder.path("mxfp4");
  ConvertOptions convert;
  convert.scheme = "mxfp4";
  ASSERT_TRUE(convert_checkpoint(test::bundled_model("mini-gpt-oss"), path, convert).ok());
  const Checkpoint checkpoint = Checkpoint::open(path).value();
  const int layer = checkpoint.layers()[0].layer;
  WeightLoader::Options options;
  options.experts_only = true;
  WeightLoader loader = loader_for(path, layer, options).value();
  const std::vector<std::string> missing = loader.missing().value();
  EXPECT_EQ(std::ranges::count_if(missing, [](const auto& n) { return n.ends_with("_blocks"); }),
            2);
  const std::vector<StoredTensor> all = read_all_tensors(path);
  const auto of_router = [](const std::string& name) { return name.find("router") != name.npos; };
  ASSERT_TRUE(push(loader, all, 1, of_router).ok());
  ASSERT_TRUE(push(loader, all, 2, [&](const auto& name) { return !of_router(name); }).ok());
  const Result<MoeLayerWeights> got = loader.finish();
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_FALSE(got->tensors.gate_weight.present());
}

// Widths that no rank's slice of the shared expert can have are refused when all is there, as of a
// file.
TEST(WeightLoaderRules, ASharedExpertThatCannotBeCutIsNamed) {
  const std::string path = test::bundled_model("mini-deepseek-v3");
  const Checkpoint checkpoint = Checkpoint::open(path).value();
  const MoeLayerSpec spec = checkpoint.layers()[0];
  WeightLoader::Options options;
  options.parallel.ep_size = 3;
  options.cut_shared = true;
  ASSERT_NE(spec.shared.intermediate_size % 3, 0);
  WeightLoader loader = loader_for(path, spec.layer, options).value();
  ASSERT_TRUE(push(loader, read_all_tensors(path), 5).ok());
  const Status status = loader.finish().status();
  EXPECT_EQ(mismatch(status, StatusCode::kInvalidArgument,
                     {"shared.intermediate_size", "a multiple of tp_size"}),
            "");
  const Status of_file =
      checkpoint.load_layer(spec.layer, options.parallel, {}, true, true).status();
  EXPECT_NE(of_file.message().find(status.message()), std::string::npos) << of_file.to_string();
}

TEST(WeightLoaderRules, DescriptionsThatContradictThemselvesAreRefused) {
  MoeLayerSpec spec;
  spec.hidden_size = kHidden;
  spec.intermediate_size = kWidth;
  spec.num_experts = spec.routing.num_experts = kExperts;
  spec.activation = make_activation("silu").value();
  const auto refuse = [](const MoeLayerSpec& s, const ExpertNames& n, std::string_view quant,
                         const std::vector<std::string>& words, StatusCode code) {
    EXPECT_EQ(mismatch(WeightLoader::from_spec(s, n, quant, {}).status(), code, words), "");
  };
  using enum StatusCode;
  ExpertNames names;
  MoeLayerSpec biased = spec;
  biased.has_expert_bias = true;
  refuse(biased, names, "", {"has_expert_bias", "one by one"}, kUnsupported);
  names.up.clear();
  refuse(spec, names, "", {"names.up", "a module"}, kInvalidArgument);
  names = {};
  names.storage = ExpertStorage::kFusedNN;
  refuse(spec, names, "", {"names.up", "none"}, kInvalidArgument);
  names = {};
  names.down = "down_proj";
  refuse(spec, names, "", {"names.down", "{e}"}, kInvalidArgument);
  names.down = "experts.{e}.{e}.down_proj";
  refuse(spec, names, "", {"names.down", "{e}", "once"}, kInvalidArgument);
  names = {};
  names.gate.clear();
  refuse(spec, names, "", {"names.gate", "silu"}, kInvalidArgument);
  names = {};
  names.block.clear();
  refuse(spec, names, "", {"names.block"}, kInvalidArgument);
  names = {};
  refuse(spec, names, R"({"bits": 4})", {"quant_method"}, kCorruptFile);
  refuse(spec, names, R"({"quant_method": "quark"})", {"quark"}, kUnsupported);
  spec.intermediate_size = 0;
  refuse(spec, names, "", {"intermediate_size", "got 0"}, kInvalidArgument);

  EXPECT_EQ(mismatch(WeightLoader::from_config(mixtral_config(), 3, {}).status(), kNotFound,
                     {"layer: got 3, need one of the MoE layers: 0, 1, 2"}),
            "");
  EXPECT_EQ(mismatch(WeightLoader::from_config("{", 0, {}).status(), kCorruptFile, {}), "");
  WeightLoader::Options options;
  options.side_files = {{"hf_quant_config.json", R"({"quantization":{"quant_algo":"FP8"}})"}};
  const std::string fp8 = mixtral_config({{"quantization_config",
                                           {{"quant_method", "fp8"},
                                            {"activation_scheme", "dynamic"},
                                            {"weight_block_size", {128, 128}}}}});
  EXPECT_EQ(mismatch(WeightLoader::from_config(fp8, 2, options).status(), kAmbiguousFormat,
                     {"hf_quant_config.json", "quantization_config of config.json"}),
            "");
  options.side_files = {{"tokenizer_config.json", "{}"}};
  EXPECT_EQ(mismatch(WeightLoader::from_config(fp8, 2, options).status(), kInvalidArgument,
                     {"side_files", "tokenizer_config.json", "quant_config.json"}),
            "");
  options = ranks(2, 2, 1, 0);
  EXPECT_EQ(mismatch(WeightLoader::from_config(mixtral_config(), 2, options).status(),
                     kInvalidArgument, {"tp_rank"}),
            "");
}

// Experts in one tensor are no linears: plain ones stay so, in whichever order they come.
TEST(WeightLoaderRules, PlainExpertsOfQuantisedLinearsAreReadAsTheyAre) {
  const Tensor gate = Tensor::zeros(DType::kBF16, {kExperts, kHidden}).value();
  const Tensor down = Tensor::zeros(DType::kBF16, {kExperts, kHidden, kWidth}).value();
  const Tensor both = Tensor::zeros(DType::kBF16, {kExperts, 2 * kWidth, kHidden}).value();
  const std::string block = "model.layers.0.mlp.";
  const nlohmann::json token = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}};
  const nlohmann::json weights = {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}};
  const nlohmann::json group = {
      {"targets", {"Linear"}}, {"weights", weights}, {"input_activations", token}};
  for (const nlohmann::json& quant :
       {nlohmann::json{{"quant_method", "bitsandbytes"}, {"load_in_8bit", true}},
        nlohmann::json{{"quant_method", "compressed-tensors"},
                       {"format", "float-quantized"},
                       {"config_groups", {{"g", group}}}}}) {
    const nlohmann::json config = {{"model_type", "qwen3_moe"},       {"hidden_size", kHidden},
                                   {"moe_intermediate_size", kWidth}, {"num_hidden_layers", 1},
                                   {"num_experts", kExperts},         {"num_experts_per_tok", 2},
                                   {"quantization_config", quant}};
    const std::vector<std::pair<std::string, const Tensor*>> all = {
        {block + "gate.weight", &gate},
        {block + "experts.down_proj", &down},
        {block + "experts.gate_up_proj", &both}};
    for (std::size_t first = 0; first < all.size(); ++first) {
      WeightLoader loader = WeightLoader::from_config(config.dump(), 0, {}).value();
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto& [name, tensor] = all[(first + i) % all.size()];
        const Result<bool> kept = loader.load(name, tensor->view());
        ASSERT_TRUE(kept.ok() && *kept) << name << kept.status().to_string();
      }
      const Result<MoeLayerWeights> got = loader.finish();
      ASSERT_TRUE(got.ok()) << got.status().to_string();
      EXPECT_EQ(got->spec.quant.name, "bf16");
      EXPECT_NE(got->spec.quant_note.find("are plain"), std::string::npos);
    }
  }
}

// --- numbers that all ranks must agree about ---

// FP8 with a scale per tensor and static activations.
std::vector<StoredTensor> fp8_experts() {
  std::vector<StoredTensor> all;
  const auto scalar = [](float v) {
    Tensor t = Tensor::zeros(DType::kF32, {}).value();
    *t.as<float>() = v;
    return t;
  };
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (const char* leaf : {"w1", "w3", "w2"}) {
      const bool down = std::string(leaf) == "w2";
      const Shape shape = down ? Shape{kHidden, kWidth} : Shape{kWidth, kHidden};
      Tensor codes = Tensor::zeros(DType::kF8E4M3, shape).value();
      for (std::int64_t i = 0; i < codes.bytes(); ++i) codes.data()[i] = std::byte{0x38};
      all.push_back({expert_tensor(e, std::string(leaf) + ".weight"), std::move(codes)});
      // Of expert 3 alone gate and up differ: no rank has one scale for both then.
      const float scale = e == 3 && std::string(leaf) == "w3" ? 0.5F : 0.25F;
      all.push_back({expert_tensor(e, std::string(leaf) + ".weight_scale"), scalar(scale)});
      all.push_back({expert_tensor(e, std::string(leaf) + ".input_scale"),
                     scalar(0.125F * static_cast<float>(e + 1))});
    }
  }
  all.push_back({kBlock + "gate.weight", counting(DType::kF32, {kExperts, kHidden}, 7)});
  return all;
}

TEST(WeightLoaderRules, NumbersThatDecideForAllRanksAreAskedForOnEvery) {
  const auto all = fp8_experts();
  const std::string config = mixtral_config(
      {{"quantization_config", {{"quant_method", "fp8"}, {"activation_scheme", "static"}}}});
  WeightLoader loader = WeightLoader::from_config(config, 2, ranks(1, 0, 2, 0)).value();
  std::vector<int> answers;
  ASSERT_TRUE(push(
                  loader, all, 3,
                  [](const std::string& name) {
                    return name != expert_tensor(3, "w3.weight_scale") &&
                           name != expert_tensor(2, "w2.input_scale") &&
                           name != expert_tensor(2, "w1.weight");
                  },
                  &answers)
                  .ok());
  EXPECT_EQ(loader.missing().value(),
            (std::vector<std::string>{expert_tensor(2, "w2.input_scale"),
                                      expert_tensor(3, "w3.weight_scale")}));
  EXPECT_EQ(mismatch(loader.finish().status(), StatusCode::kMissingTensor,
                     {expert_tensor(3, "w3.weight_scale"), expert_tensor(2, "w2.input_scale")}),
            "");
  for (const char* leaf : {"w3.weight_scale", "w2.input_scale"}) {
    const std::string name = expert_tensor(std::string(leaf) == "w3.weight_scale" ? 3 : 2, leaf);
    const Result<bool> late = loader.load(name, find(all, name).tensor.view());
    ASSERT_TRUE(late.ok()) << late.status().to_string();
    EXPECT_TRUE(*late) << name;
  }
  Result<MoeLayerWeights> got = loader.finish();
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  const ExpertWeightsView v = got->experts->expert(0).value();
  EXPECT_EQ(got->spec.quant.weight.granularity, ScaleGranularity::kChannel);
  EXPECT_EQ(floats(v.w13_input_scale), std::vector<float>{0.125F});  // its own
}

}  // namespace
}  // namespace moesaic::test
