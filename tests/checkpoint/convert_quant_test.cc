// Sources whose linears outside the routed experts are quantised, in every format: they are copied
// byte for byte, and the result's configuration describes them as the source's did, and the experts
// as they are now.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/config/config.h"
#include "checkpoint/config/quant_config.h"
#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container/shards.h"
#include "checkpoint/container_support.h"
#include "checkpoint/convert/config.h"
#include "checkpoint/generated_files.h"
#include "experts/expert_fields.h"
#include "moesaic/convert.h"
#include "quant/dequantize_weight.h"
#include "support/refusal.h"

namespace moesaic::test {
namespace {

class ConvertQuantized : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string python = MOESAIC_PYTHON;
    if (python.empty()) return;
    sources_ = new TempDir();
    files_ = new GeneratedFiles(generate_files(python, "make_convert_sources.py", *sources_));
  }
  static void TearDownTestSuite() {
    delete files_;
    delete sources_;
    files_ = nullptr;
    sources_ = nullptr;
  }
  void SetUp() override {
    if (files_ == nullptr) GTEST_SKIP() << "no Python 3 interpreter: checkpoints not written";
    ASSERT_EQ(files_->problem, "");
    ASSERT_GE(files_->manifest.size(), 50U);
  }
  static TempDir* sources_;
  static GeneratedFiles* files_;
};
TempDir* ConvertQuantized::sources_ = nullptr;
GeneratedFiles* ConvertQuantized::files_ = nullptr;

// The routed experts of all families of the script, one by one or stacked.
bool is_expert(const std::string& name) { return name.find(".experts.") != std::string::npos; }

struct Copy {
  DType dtype;
  Shape shape;
  std::vector<std::byte> bytes;
  bool operator==(const Copy& o) const {
    return dtype == o.dtype && shape == o.shape && bytes == o.bytes;
  }
};
std::map<std::string, Copy> copies_of(const std::string& folder) {
  std::map<std::string, Copy> copies;
  const checkpoint::ShardSet shards = checkpoint::ShardSet::open(folder, FileAccess::kCopy).value();
  for (const checkpoint::ShardSet::Located& t : shards.tensors()) {
    if (is_expert(t.info->name)) continue;
    Copy copy{t.info->dtype, t.info->shape, std::vector<std::byte>(t.info->bytes())};
    EXPECT_TRUE(t.file->read_range(*t.info, 0, copy.bytes).ok());
    copies.emplace(t.info->name, std::move(copy));
  }
  return copies;
}

checkpoint::QuantConfig description(const std::string& folder) {
  const std::string text = read_bytes(folder + "/config.json");
  return checkpoint::parse_quant_config(nlohmann::json::parse(text)).value();
}

// All weights of the routed experts as numbers.
std::vector<float> expert_values(const std::string& folder) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(folder);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  if (!checkpoint.ok()) return {};
  for (const std::string& problem : checkpoint->problems()) ADD_FAILURE() << problem;
  Result<MoeLayerWeights> layer = checkpoint->load_layer(0, {});
  EXPECT_TRUE(layer.ok()) << layer.status().message();
  if (!layer.ok()) return {};
  const MoeLayerSpec& spec = layer->spec;
  const std::int64_t h = spec.hidden_size, i = spec.intermediate_size;
  std::vector<float> values;
  for (std::int64_t e = 0; e < spec.num_experts; ++e) {
    const Result<ExpertWeightsView> read = layer->experts->expert(e);
    EXPECT_TRUE(read.ok()) << read.status().message();
    if (!read.ok()) return {};
    const ExpertWeightsView v = *read;
    Tensor w13 = Tensor::uninitialized(DType::kF32, {2 * i, h}).value();
    Tensor w2 = Tensor::uninitialized(DType::kF32, {h, i}).value();
    EXPECT_TRUE(quant::dequantize_weight(spec.quant.weight,
                                         {v.w13, v.w13_scale, v.w13_global_scale,
                                          v.w13_channel_scale, v.w13_zero, v.w13_min, v.w13_perm},
                                         i, w13.view())
                    .ok());
    EXPECT_TRUE(quant::dequantize_weight(spec.quant.weight,
                                         {v.w2, v.w2_scale, v.w2_global_scale, v.w2_channel_scale,
                                          v.w2_zero, v.w2_min, v.w2_perm},
                                         h, w2.view())
                    .ok());
    for (const Tensor* t : {&w13, &w2}) {
      values.insert(values.end(), t->as<float>(), t->as<float>() + t->bytes() / 4);
    }
  }
  return values;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    error += d * d;
    size += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return got.size() == want.size() && size > 0 ? std::sqrt(error / size) : 1.0;
}

// The bytes of a shared expert as it is loaded.
std::string shared_bytes(const std::string& folder) {
  const MoeLayerWeights layer = Checkpoint::open(folder).value().load_layer(0, {}).value();
  if (!layer.shared) return "";
  const ExpertWeightsView view = layer.shared->expert(0).value();
  std::string bytes;
  for (const experts::ExpertField& field : experts::kExpertFields) {
    const ConstTensorView& t = view.*field.view;
    if (!t.present()) continue;
    const std::int64_t size = t.shape.num_elements().value() * dtype_bits(t.dtype) / 8;
    bytes.append(reinterpret_cast<const char*>(t.data), static_cast<std::size_t>(size));
  }
  return bytes;
}

constexpr const char* kQuery = "model.layers.0.self_attn.q_proj";

struct Target {
  const char* scheme;
  DType dtype;
  double error;
  std::int64_t step;  // columns that must be whole
};
const Target kTargets[] = {{"fp8-channel", DType::kF8E4M3, 0.05, 1},
                           {"mxfp8", DType::kF8E4M3, 0.05, 32},
                           {"nvfp4", DType::kF4E2M1, 0.2, 16},
                           {"fp8-block", DType::kF8E4M3, 0.05, 128}};

// Says rightly that a size does not fit the target's groups or blocks.
bool refuses_size(const std::string& message, const Target& target) {
  static const std::regex kRefusal(
      R"(got (?:\[\d+, |intermediate_size )(\d+)\]?, need a multiple of (\d+) (?:columns )?for (\S+))");
  std::smatch found;
  return std::regex_search(message, found, kRefusal) && std::stoll(found[2]) == target.step &&
         std::stoll(found[1]) % target.step != 0 && found[3] == target.scheme;
}

TEST_F(ConvertQuantized, WhatIsNoExpertIsCopiedAndDescribedAsBefore) {
  std::set<std::string> methods;
  int done = 0;
  for (const auto& item : files_->manifest) {
    const std::string from = sources_->path(item["path"].get<std::string>());
    const auto before = copies_of(from);
    const std::string config = read_bytes(from + "/config.json");
    const checkpoint::SourceQuantization source =
        checkpoint::read_source_quantization(from, config).value();
    // The script's attention is quantised, and the source says how.
    const checkpoint::LinearFormat attention = checkpoint::module_format(source.parsed, kQuery);
    ASSERT_NE(attention.stored, checkpoint::StoredFormat::kPlain) << from;
    const std::vector<float> original = expert_values(from);
    for (const Target& target : kTargets) {
      SCOPED_TRACE(item["name"].get<std::string>() + " to " + target.scheme);
      const TempDir root;
      const std::string to = root.path("out");
      ConvertOptions options;
      options.scheme = target.scheme;
      options.num_threads = 1;
      const Result<ConvertReport> report = convert_checkpoint(from, to, options);
      if (!report.ok()) {  // by the sizes, or a family without names for single experts
        expect_refusal(report.status(), StatusCode::kUnsupported, {});
        const bool stacked = report.status().message().find("stacked") != std::string::npos;
        EXPECT_TRUE(stacked || refuses_size(report.status().message(), target))
            << report.status().message();
        continue;
      }
      ++done;
      EXPECT_TRUE(copies_of(to) == before);
      const checkpoint::QuantConfig after = description(to);
      EXPECT_TRUE(checkpoint::module_format(after, kQuery) == attention);
      for (const char* plain : {"lm_head", "model.layers.0.mlp.gate"}) {
        if (before.count(std::string(plain) + ".weight") == 0) continue;
        EXPECT_TRUE(checkpoint::module_format(after, plain) ==
                        checkpoint::module_format(source.parsed, plain) ||
                    checkpoint::module_format(after, plain).stored ==
                        checkpoint::StoredFormat::kPlain);
      }
      const Result<Checkpoint> opened = Checkpoint::open(to);
      ASSERT_TRUE(opened.ok()) << opened.status().message();
      EXPECT_EQ(opened->layers()[0].quant.weight.dtype, target.dtype);
      EXPECT_LT(relative_error(expert_values(to), original), target.error);
      if (opened->layers()[0].shared.intermediate_size > 0) {
        EXPECT_TRUE(shared_bytes(to) == shared_bytes(from));
      }
      const auto json = nlohmann::json::parse(read_bytes(to + "/config.json"));
      methods.insert(json["quantization_config"].value("quant_method", "parts"));
    }
  }
  EXPECT_GE(done, 120);
  EXPECT_EQ(methods, (std::set<std::string>{"compressed-tensors", "parts"}));
}

// gpt-oss's own layout has the biases of all experts in one tensor, and copies that.
TEST_F(ConvertQuantized, BiasesOfSingleExpertsAreNotLeftOut) {
  const TempDir root;
  ConvertOptions options;
  options.scheme = "mxfp4";
  const std::string from = sources_->path("gpt_oss_split");
  expect_refusal(convert_checkpoint(from, root.path("out"), options).status(),
                 StatusCode::kUnsupported, {"experts.0.", ".bias", "one tensor"});
  EXPECT_FALSE(std::filesystem::exists(root.path("out")));
}

// Back and forth: what stays does not change, and no description is wrapped in another.
TEST_F(ConvertQuantized, ResultsConvertAgain) {
  const std::string from = sources_->path("gptq");
  const TempDir root;
  std::string last = from;
  for (const char* scheme : {"mxfp8", "fp8-channel", "nvfp4"}) {
    ConvertOptions options;
    options.scheme = scheme;
    const Result<ConvertReport> report = convert_checkpoint(last, root.path(scheme), options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    ASSERT_EQ(report->notes.size(), 1U);
    EXPECT_NE(report->notes[0].find("gptq"), std::string::npos) << report->notes[0];
    last = root.path(scheme);
    EXPECT_TRUE(copies_of(last) == copies_of(from));
    const auto json = nlohmann::json::parse(read_bytes(last + "/config.json"));
    EXPECT_EQ(json["quantization_config"]["other_modules"]["quantization_config"]["quant_method"],
              "gptq");
  }
}

// Wherever the description is between the top and the language model, and nowhere else afterwards.
TEST(ConvertDescription, InsideWrappers) {
  using Json = nlohmann::ordered_json;
  const TempDir root;
  const Json stated = {{"quantization_config", {{"quant_method", "fp8"}, {"fmt", "e4m3"}}}};
  for (const Json& top : std::vector<Json>{
           stated,
           {{"model_type", "x"}, {"text_config", stated}},
           {{"model_type", "qwen3_omni_moe"}, {"thinker_config", {{"text_config", stated}}}},
           {{"model_type", "unlimited_ocr"}, {"language_config", stated}}}) {
    SCOPED_TRACE(top.dump());
    const auto source = checkpoint::read_source_quantization(root.path(), top.dump());
    ASSERT_TRUE(source.ok()) << source.status().to_string();
    EXPECT_EQ(source->json, stated["quantization_config"]);
    EXPECT_EQ(source->parsed.linear.stored, checkpoint::StoredFormat::kFp8Tensor);
    const std::string made = checkpoint::converted_config(top.dump(), {{"new", 1}}).value();
    EXPECT_EQ(made.find("e4m3"), std::string::npos) << made;
    EXPECT_EQ(Json::parse(made)["quantization_config"], (Json{{"new", 1}}));
  }
}

// --- descriptions --------------------------------------------------------------------------------

using Json = nlohmann::ordered_json;

// Said before anything is written.
TEST(ConvertDescription, ATooLargeOneIsNotWritten) {
  const Json large = {{"new", std::string(checkpoint::kMaxConfigBytes, 'x')}};
  expect_refusal(checkpoint::converted_config(R"({"model_type":"x"})", large).status(),
                 StatusCode::kLimitExceeded, {"config.json of the result", "32000000"});
}

checkpoint::SourceQuantization described(const char* quant) {
  checkpoint::SourceQuantization source;
  source.json = Json::parse(quant);
  source.parsed = checkpoint::parse_quant_config(
                      nlohmann::json({{"quantization_config", nlohmann::json::parse(quant)}}))
                      .value();
  return source;
}
checkpoint::QuantConfig parsed(const Json& quant) {
  return checkpoint::parse_quant_config(
             nlohmann::json({{"quantization_config", nlohmann::json::parse(quant.dump())}}))
      .value();
}

checkpoint::ConvertedModules modules_of(checkpoint::ConvertFormat format) {
  checkpoint::ConvertedModules modules;
  modules.format = format;
  modules.experts = {{3, "model.layers.3.mlp.experts", false},
                     {4, "model.layers.4.mlp.experts", false}};
  modules.plain = {"model.embed_tokens", "model.layers.3.mlp.gate"};
  modules.quantized = {"model.layers.3.self_attn.q_proj", "model.layers.5.mlp.experts.0.up_proj"};
  return modules;
}
constexpr std::array<std::string_view, 3> kProjections = {"gate_proj", "up_proj", "down_proj"};
checkpoint::StoredFormat experts_of(const checkpoint::QuantConfig& quant, int layer) {
  return checkpoint::experts_format(quant, "model.layers." + std::to_string(layer) + ".mlp.experts",
                                    8, kProjections)
      .value()
      .stored;
}

TEST(ConvertDescription, Fp8BlocksKeepTheirOwnWords) {
  const checkpoint::SourceQuantization source = described(
      R"({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
          "scale_fmt": "ue8m0", "modules_to_not_convert": ["mlp.gate"]})");
  checkpoint::ConvertedModules modules = modules_of(checkpoint::ConvertFormat::kFp8Block);
  const checkpoint::ConvertedQuantization same =
      checkpoint::describe_conversion(source, modules).value();
  EXPECT_EQ(same.json, source.json);
  // What the source states about its scales holds for the new experts, too.
  EXPECT_EQ(same.format, checkpoint::ConvertFormat::kFp8BlockPowers);
  EXPECT_TRUE(same.notes.empty());
  // Experts that were left out are in now; what is left out is named one by one.
  const checkpoint::SourceQuantization without = described(
      R"({"quant_method": "fp8", "weight_block_size": [128, 128],
          "ignored_layers": ["experts", "mlp.gate"]})");
  for (auto& experts : modules.experts) experts.plain = true;
  const checkpoint::ConvertedQuantization made =
      checkpoint::describe_conversion(without, modules).value();
  EXPECT_EQ(made.format, checkpoint::ConvertFormat::kFp8Block);
  const checkpoint::QuantConfig after = parsed(made.json);
  EXPECT_EQ(experts_of(without.parsed, 3), checkpoint::StoredFormat::kPlain);
  EXPECT_EQ(experts_of(after, 3), checkpoint::StoredFormat::kFp8Block);
  for (const std::string& plain : modules.plain) {
    EXPECT_EQ(checkpoint::module_format(after, plain).stored, checkpoint::StoredFormat::kPlain)
        << plain;
  }
}

// Linears that stay keep blocks of their size, the experts get blocks of 128: two descriptions.
TEST(ConvertDescription, Fp8BlocksOfAnotherSizeAreNotTheExperts) {
  const checkpoint::SourceQuantization source = described(
      R"({"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic",
          "modules_to_not_convert": ["mlp.gate"]})");
  const checkpoint::ConvertedModules modules = modules_of(checkpoint::ConvertFormat::kFp8Block);
  const checkpoint::QuantConfig after =
      parsed(checkpoint::describe_conversion(source, modules).value().json);
  const checkpoint::LinearFormat experts =
      checkpoint::experts_format(after, "model.layers.3.mlp.experts", 8, kProjections).value();
  EXPECT_EQ(experts.stored, checkpoint::StoredFormat::kFp8Block);
  EXPECT_EQ(experts.block, (quant::BlockShape{128, 128}));
  EXPECT_EQ(checkpoint::module_format(after, modules.quantized.front()).block,
            (quant::BlockShape{64, 64}));
}

TEST(ConvertDescription, GroupsOfCompressedTensorsDoNotOverlap) {
  const checkpoint::SourceQuantization source = described(
      R"({"quant_method": "compressed-tensors", "format": "int-quantized", "version": "0.9",
          "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {
            "experts": {"targets": ["re:.*experts.*"], "format": "pack-quantized", "weights":
              {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
            "rest": {"targets": ["Linear"], "weights":
              {"num_bits": 8, "type": "int", "strategy": "channel"}}}})");
  const checkpoint::ConvertedModules modules = modules_of(checkpoint::ConvertFormat::kFp8Block);
  const checkpoint::ConvertedQuantization made =
      checkpoint::describe_conversion(source, modules).value();
  EXPECT_EQ(made.format, checkpoint::ConvertFormat::kFp8BlockCompressed);
  EXPECT_EQ(made.json["version"], "0.9");
  EXPECT_EQ(made.json["format"], "mixed-precision");
  const checkpoint::QuantConfig after = parsed(made.json);
  EXPECT_EQ(experts_of(after, 3), checkpoint::StoredFormat::kFp8Block);
  EXPECT_EQ(experts_of(after, 4), checkpoint::StoredFormat::kFp8Block);
  for (const std::string& module : modules.quantized) {
    EXPECT_TRUE(checkpoint::module_format(after, module) ==
                checkpoint::module_format(source.parsed, module))
        << module;
  }
  // One target, and only one, for every linear: no reader's order of precedence matters.
  for (const auto& [name, group] : made.json["config_groups"].items()) {
    for (const auto& target : group["targets"]) EXPECT_NE(target, "Linear") << name;
  }
  EXPECT_EQ(made.json["config_groups"]["group_0"]["targets"][0],
            "re:model\\.layers\\.(3|4)\\.mlp\\.experts\\.");
  // Without experts of other layers the pattern needs no list of layers.
  checkpoint::ConvertedModules no_others = modules;
  no_others.quantized.pop_back();
  EXPECT_EQ(checkpoint::describe_conversion(source, no_others)
                .value()
                .json["config_groups"]["group_0"]["targets"],
            Json::array({"re:model\\.layers\\.[^.]+\\.mlp\\.experts\\."}));
  // A linear with scales that the description leaves out.
  checkpoint::ConvertedModules contradiction = modules;
  contradiction.quantized.push_back("model.layers.3.mlp.gate");
  expect_refusal(checkpoint::describe_conversion(source, contradiction).status(),
                 StatusCode::kAmbiguousFormat, {"model.layers.3.mlp.gate", "leaves it out"});
}

// Of converted experts nothing is left in the description of the others, which may name each one.
TEST(ConvertDescription, EntriesOfConvertedExpertsGo) {
  const auto description = [](const char* layers) {
    return described((R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "exclude_modules": ["model.layers.3.mlp.experts.7*", "model.layers.3.mlp.gate", "mtp*",
                            "model.layers.4.mlp.experts.0.up_proj"], "quantized_layers": {)" +
                      std::string(layers) + "}}")
                         .c_str());
  };
  const auto others = [](const checkpoint::SourceQuantization& source) {
    return checkpoint::describe_conversion(source, modules_of(checkpoint::ConvertFormat::kNvfp4))
        .value()
        .json["other_modules"]["quantization_config"];
  };
  Json made = others(description(R"(
      "model.layers.3.mlp.experts.1.up_proj": {"quant_algo": "NVFP4"},
      "model.layers.5.mlp.experts": {"quant_algo": "NVFP4"},
      "model.layers.4.mlp.experts": {"quant_algo": "NVFP4"},
      "model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"})"));
  EXPECT_EQ(made["quantized_layers"].dump(),
            R"({"model.layers.5.mlp.experts":{"quant_algo":"NVFP4"},)"
            R"("model.layers.3.self_attn.q_proj":{"quant_algo":"FP8"}})");
  EXPECT_EQ(made["exclude_modules"], Json::array({"model.layers.3.mlp.gate", "mtp*"}));
  // One of them says that there is a list, which an empty one would not.
  made = others(description(R"("model.layers.3.mlp.experts.1.up_proj": {"quant_algo": "NVFP4"},
                               "model.layers.4.mlp.experts": {"quant_algo": "NVFP4"})"));
  EXPECT_EQ(made["quantized_layers"].size(), 1U);
  EXPECT_TRUE(parsed(made).quantized());
}

TEST(ConvertDescription, TwoMethodsAreTwoParts) {
  const checkpoint::SourceQuantization source =
      described(R"({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true})");
  const checkpoint::ConvertedModules modules = modules_of(checkpoint::ConvertFormat::kNvfp4);
  const checkpoint::ConvertedQuantization made =
      checkpoint::describe_conversion(source, modules).value();
  ASSERT_EQ(made.notes.size(), 1U);
  EXPECT_NE(made.notes[0].find("awq"), std::string::npos);
  // Readers that look for a method find none.
  EXPECT_FALSE(made.json.contains("quant_method"));
  const checkpoint::QuantConfig after = parsed(made.json);
  EXPECT_EQ(experts_of(after, 3), checkpoint::StoredFormat::kNvfp4);
  EXPECT_EQ(experts_of(after, 5),
            checkpoint::StoredFormat::kAwq);  // of a layer that was not converted
  for (const std::string& module : modules.quantized) {
    EXPECT_EQ(checkpoint::module_format(after, module).stored, checkpoint::StoredFormat::kAwq)
        << module;
  }
  // Halves that are missing, or of the same method again.
  const auto refusal = [](Json json) {
    return checkpoint::parse_quant_config(
               nlohmann::json({{"quantization_config", nlohmann::json::parse(json.dump())}}))
        .status();
  };
  for (const char* half : {"routed_experts", "other_modules"}) {
    Json broken = made.json;
    broken.erase(half);
    expect_refusal(refusal(broken), StatusCode::kCorruptFile, {half, "missing"});
    broken = made.json;
    broken[half].erase("quantization_config");
    expect_refusal(refusal(broken), StatusCode::kCorruptFile, {half, "quantization_config"});
    broken = made.json;
    broken[half]["quantization_config"] = made.json;
    expect_refusal(refusal(broken), StatusCode::kCorruptFile, {half, "quant_method"});
  }
  Json broken = made.json;
  broken["routed_experts"].erase("modules");
  expect_refusal(refusal(broken), StatusCode::kCorruptFile, {"modules", "missing"});
  broken = made.json;
  broken["quant_method"] = "fp8";
  expect_refusal(refusal(broken), StatusCode::kAmbiguousFormat, {"quant_method", "other_modules"});
}

bool lists(const Json& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// vLLM asks for linears that it joins by the joined name where a model's class states no parts.
TEST(ConvertDescription, JoinedLinearsAreNamedAsWell) {
  checkpoint::ConvertedModules modules = modules_of(checkpoint::ConvertFormat::kFp8Block);
  modules.quantized.clear();
  modules.plain = {"model.layers.0.mlp.gate_proj",        "model.layers.0.mlp.up_proj",
                   "model.layers.0.self_attn.q_proj",     "model.layers.0.self_attn.k_proj",
                   "model.layers.0.self_attn.v_proj",
                   "model.layers.1.self_attn.q_proj",  // half of a pair is not joined
                   "model.layers.1.mlp.up_proj",          "model.layers.5.mlp.experts.0.gate_proj",
                   "model.layers.5.mlp.experts.0.up_proj"};
  const std::vector<std::string> joined = {"model.layers.0.mlp.gate_up_proj",
                                           "model.layers.0.self_attn.qkv_proj", "lm_head"};
  for (const checkpoint::ConvertFormat format :
       {checkpoint::ConvertFormat::kFp8Block, checkpoint::ConvertFormat::kNvfp4}) {
    modules.format = format;
    const Json made = checkpoint::describe_conversion({}, modules).value().json;
    const Json& list = made[made.contains("ignore") ? "ignore" : "modules_to_not_convert"];
    EXPECT_EQ(list.size(), modules.plain.size() + joined.size()) << list;
    for (const std::string& name : joined) EXPECT_TRUE(lists(list, name)) << name;
    for (const std::string& name : modules.plain) EXPECT_TRUE(lists(list, name)) << name;
    EXPECT_EQ(experts_of(parsed(made), 3), format == checkpoint::ConvertFormat::kNvfp4
                                               ? checkpoint::StoredFormat::kNvfp4
                                               : checkpoint::StoredFormat::kFp8Block);
  }
  // A group's members likewise, which replace the classes that named them before.
  const checkpoint::SourceQuantization source = described(
      R"({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {
            "rest": {"targets": ["Linear"], "weights":
              {"num_bits": 8, "type": "int", "strategy": "channel"}}}})");
  modules.format = checkpoint::ConvertFormat::kNvfp4;
  std::swap(modules.plain, modules.quantized);
  const Json groups =
      checkpoint::describe_conversion(source, modules).value().json["config_groups"];
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_TRUE(lists(groups["group_1"]["targets"], "model.layers.0.mlp.gate_up_proj")) << groups;
  EXPECT_FALSE(lists(groups["group_1"]["targets"], "model.layers.1.self_attn.qkv_proj")) << groups;
}

// Where ModelOpt's fields lie inside, that of the cache would be lost.
TEST(ConvertDescription, FieldsInsideQuantizationComeOut) {
  const auto source = checkpoint::read_source_quantization("", R"({"quantization_config":
      {"quant_method": "modelopt", "quantization":
       {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}})");
  ASSERT_TRUE(source.ok()) << source.status().to_string();
  EXPECT_EQ(source->json, Json::parse(R"({"quant_method": "modelopt", "quant_algo": "NVFP4",
                                          "kv_cache_quant_algo": "FP8"})"));
}

TEST(ConvertDescription, NothingElseQuantised) {
  const checkpoint::SourceQuantization source =
      described(R"({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true})");
  checkpoint::ConvertedModules modules = modules_of(checkpoint::ConvertFormat::kMxfp8);
  modules.quantized.clear();
  const checkpoint::ConvertedQuantization made =
      checkpoint::describe_conversion(source, modules).value();
  EXPECT_EQ(made.json["quant_method"], "compressed-tensors");
  EXPECT_TRUE(made.notes.empty());
  // Scales of a cache stay and need the source's words; scales without any words are refused.
  modules.kv_scales = true;
  EXPECT_TRUE(
      checkpoint::describe_conversion(source, modules).value().json.contains("other_modules"));
  expect_refusal(checkpoint::describe_conversion({}, modules).status(),
                 StatusCode::kAmbiguousFormat, {"cache", "no quantization_config"});
  modules = modules_of(checkpoint::ConvertFormat::kMxfp8);
  expect_refusal(checkpoint::describe_conversion({}, modules).status(),
                 StatusCode::kAmbiguousFormat,
                 {"model.layers.3.self_attn.q_proj", "no quantization_config"});
}

}  // namespace
}  // namespace moesaic::test
