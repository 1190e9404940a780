// Tensors handed over in any order give the bits of the files: every family, every format, every way
// to spread a layer over ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/generated_files.h"
#include "checkpoint/pushing.h"
#include "checkpoint/tiny_support.h"
#include "moesaic/device.h"
#include "moesaic/device_tensor.h"
#include "moesaic/fused_moe.h"
#include "support/source_folder.h"

namespace moesaic::test {
namespace {

std::vector<ParallelConfig> ways_to_spread(const std::vector<int>& tp_sizes, int experts) {
  std::vector<ParallelConfig> all = {ParallelConfig{}};
  for (const int size : tp_sizes) {
    for (int rank = 0; rank < size; ++rank) {
      all.emplace_back();
      all.back().tp_size = size;
      all.back().tp_rank = rank;
    }
  }
  for (const int size : {2, experts + 1}) {  // of the second some ranks own nothing
    for (int rank = 0; rank < size; rank += size == 2 ? 1 : experts) {
      all.emplace_back();
      all.back().ep_size = size;
      all.back().ep_rank = rank;
      all.back().placement = size == 2 ? ExpertPlacement::kRoundRobin : ExpertPlacement::kLinear;
    }
  }
  return all;
}

std::string words(const ParallelConfig& p) {
  return "tp " + std::to_string(p.tp_rank) + "/" + std::to_string(p.tp_size) + " ep " +
         std::to_string(p.ep_rank) + "/" + std::to_string(p.ep_size);
}

// Pushes everything, in several orders, and compares; the number of layers compared.
int expect_bits_of_file(const std::string& path, const std::vector<int>& layers,
                        const std::vector<int>& tp_sizes, bool cut_shared = false) {
  const Checkpoint checkpoint = must_open(path);
  const std::vector<StoredTensor> tensors = read_all_tensors(path);
  int compared = 0;
  for (const int layer : layers) {
    const std::int64_t experts = checkpoint.layer(layer).value().num_experts;
    for (const ParallelConfig& parallel : ways_to_spread(tp_sizes, static_cast<int>(experts))) {
      if (cut_shared && parallel.ep_size > 2) continue;  // as many slices
      SCOPED_TRACE(path + " layer " + std::to_string(layer) + " " + words(parallel));
      Result<MoeLayerWeights> want = checkpoint.load_layer(layer, parallel, {}, true, cut_shared);
      EXPECT_TRUE(want.ok()) << want.status().to_string();
      WeightLoader::Options options;
      options.parallel = parallel;
      options.cut_shared = cut_shared;
      Result<WeightLoader> loader = loader_for(path, layer, options);
      EXPECT_TRUE(loader.ok()) << loader.status().to_string();
      if (!want.ok() || !loader.ok()) return compared;
      const auto seed = static_cast<std::uint64_t>(100 * layer + compared);
      const Status pushed = push(*loader, tensors, seed);
      EXPECT_TRUE(pushed.ok()) << pushed.to_string();
      EXPECT_EQ(loader->missing().value(), std::vector<std::string>());
      Result<MoeLayerWeights> got = loader->finish();
      EXPECT_TRUE(got.ok()) << got.status().to_string();
      if (!got.ok()) return compared;
      const auto slots = local_expert_ids(experts, parallel).value().size();
      EXPECT_EQ(weights_difference(*got, *want, static_cast<std::int64_t>(slots)), "");
      EXPECT_FALSE(loader->load("any", ConstTensorView()).ok());
      EXPECT_FALSE(loader->finish().ok());
      ++compared;
    }
  }
  return compared;
}

TEST_F(TinyCheckpoints, PushedTensorsGiveTheBitsOfTheFile) {
  int compared = 0;
  for (const TinyCase& c : cases()) {
    compared += expect_bits_of_file(c.directory, c.layers, {2});
  }
  EXPECT_GE(compared, 200);
}

// Checkpoints of every format, written once.
class PushedFormats : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string python = MOESAIC_PYTHON;
    if (python.empty()) return;
    folder_ = std::make_unique<TempDir>();
    files_ = generate_files(python, "make_quant_checkpoints.py", *folder_);
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (!files_) GTEST_SKIP() << "no Python 3 interpreter: checkpoints not written";
    ASSERT_EQ(files_->problem, "");
  }
  static inline std::unique_ptr<TempDir> folder_;
  static inline std::optional<GeneratedFiles> files_;
};

TEST_F(PushedFormats, GiveTheBitsOfTheFile) {
  int cases = 0;
  for (const auto& item : files_->manifest) {
    const auto tp = item["tp"].get<std::vector<int>>();
    EXPECT_GT(expect_bits_of_file(folder_->path(item["path"].get<std::string>()), {0}, tp), 0);
    ++cases;
  }
  EXPECT_GE(cases, 45);
}

// Whatever comes first, and however late the tensors tell how the experts are stored.
TEST_F(PushedFormats, RoutersMayComeBeforeExpertsThatAreAskedForAlone) {
  WeightLoader::Options options;
  options.experts_only = true;
  const auto of_experts = [](const std::string& name) {
    return name.find("experts.") != name.npos || name.find("ffn_") != name.npos;
  };
  for (const auto& item : files_->manifest) {
    const std::string path = folder_->path(item["path"].get<std::string>());
    SCOPED_TRACE(path);
    const std::vector<StoredTensor> all = read_all_tensors(path);
    WeightLoader loader = loader_for(path, 0, options).value();
    ASSERT_TRUE(push(loader, all, 1, [&](const auto& name) { return !of_experts(name); }).ok());
    ASSERT_TRUE(push(loader, all, 2, of_experts).ok());
    const Result<MoeLayerWeights> got = loader.finish();
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_FALSE(got->tensors.gate_weight.present());
    EXPECT_EQ(got->shared, nullptr);
  }
}

// A router that waits for what the experts say goes on waiting where they are refused.
TEST_F(PushedFormats, WhatIsRefusedTellsNothing) {
  WeightLoader::Options options;
  options.experts_only = true;
  const Tensor wrong = Tensor::zeros(DType::kI64, {3, 1, 3}).value();
  int refused = 0;
  for (const auto& item : files_->manifest) {
    const auto name = item["path"].get<std::string>();
    if (name != "llama4_per_expert" && name != "gpt_oss_split_gptq" && name != "step3_nvfp4") {
      continue;
    }
    SCOPED_TRACE(name);
    const std::string path = folder_->path(name);
    const std::vector<StoredTensor> all = read_all_tensors(path);
    const auto of_experts = [](const std::string& n) { return n.find("experts.") != n.npos; };
    WeightLoader loader = loader_for(path, 0, options).value();
    ASSERT_TRUE(push(loader, all, 1, [&](const auto& n) { return !of_experts(n); }).ok());
    const std::int64_t waiting = loader.bytes();
    EXPECT_GT(waiting, 0);
    for (const StoredTensor& t : all) {
      if (!of_experts(t.name)) continue;
      if (loader.load(t.name, wrong.view()).ok()) break;
      ++refused;
      EXPECT_EQ(loader.bytes(), waiting) << t.name;
    }
  }
  EXPECT_GT(refused, 0);
}

// A rank that leaves out the first experts, but for what missing() asks for.
TEST_F(PushedFormats, ExpertsOfOtherRanksMayStayAway) {
  WeightLoader::Options options;
  options.parallel.ep_size = 2;
  options.parallel.ep_rank = 1;
  const std::regex of_first(R"((experts|ffn_(gate|up|down))\.[01]\.)");
  int partial = 0;
  for (const auto& item : files_->manifest) {
    const std::string path = folder_->path(item["path"].get<std::string>());
    SCOPED_TRACE(path);
    const std::vector<StoredTensor> all = read_all_tensors(path);
    const auto is_local = [&](const auto& name) { return !std::regex_search(name, of_first); };
    if (std::all_of(all.begin(), all.end(), [&](const auto& t) { return is_local(t.name); })) {
      continue;  // all experts in one tensor
    }
    Result<MoeLayerWeights> want = Checkpoint::open(path).value().load_layer(0, options.parallel);
    ASSERT_TRUE(want.ok()) << want.status().to_string();
    WeightLoader loader = loader_for(path, 0, options).value();
    const Status local = push(loader, all, 1, is_local);
    ASSERT_TRUE(local.ok()) << local.to_string();
    const Result<std::vector<std::string>> missing = loader.missing();
    ASSERT_TRUE(missing.ok()) << missing.status().to_string();
    const auto is_missing = [&](const auto& name) {
      return std::find(missing->begin(), missing->end(), name) != missing->end();
    };
    ASSERT_TRUE(push(loader, all, 2, is_missing).ok());
    Result<MoeLayerWeights> got = loader.finish();
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(weights_difference(*got, *want, want->spec.num_experts / 2), "");
    ++partial;
  }
  EXPECT_GE(partial, 45);
}

// As readers of GGUF files hand them over: the type with every tensor, BF16 as bytes.
TEST_F(PushedFormats, NumbersOfGgufMayComeWithTheirType) {
  const std::string path = folder_->path("gguf_q8_0.gguf");
  const std::vector<StoredTensor> all = read_all_tensors(path);
  const auto type_of = [](DType dtype) -> std::uint32_t {
    return dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 1 : 30;
  };
  Result<MoeLayerWeights> want = Checkpoint::open(path).value().load_layer(0, {});
  ASSERT_TRUE(want.ok());
  for (const bool as_bytes : {false, true}) {
    WeightLoader loader = loader_for(path, 0, {}).value();
    for (const StoredTensor& t : all) {
      ConstTensorView view = t.tensor.view();
      if (as_bytes && !t.blocks) {
        const std::int64_t row = view.dim(view.rank() - 1) * dtype_bits(view.dtype) / 8;
        view = {view.data, DType::kU8, view.rank() == 1 ? Shape{row} : Shape{view.dim(0), row}};
      }
      const std::uint32_t type = t.blocks ? t.ggml_type : type_of(t.tensor.dtype());
      const Result<bool> kept = loader.load(t.name, view, type);
      EXPECT_TRUE(kept.ok()) << kept.status().to_string();
    }
    Result<MoeLayerWeights> got = loader.finish();
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(weights_difference(*got, *want, want->spec.num_experts), "");
  }
  const Tensor codes = Tensor::zeros(DType::kI32, {2, 3}).value();
  EXPECT_EQ(
      mismatch(loader_for(path, 0, {})->load("blk.0.ffn_gate_inp.weight", codes.view(), 0).status(),
               StatusCode::kInvalidDType, {"ffn_gate_inp", "I32 [2, 3]", "F32", "U8"}),
      "");
}

// A slice of the shared expert for each rank with the same rows, plain and in FP8 blocks.
TEST_F(TinyCheckpoints, PushedSharedExpertsAreCutAsThoseOfTheFile) {
  int cut = 0;
  for (const TinyCase& c : cases()) {
    const Checkpoint checkpoint = must_open(c.directory);
    for (const int layer : c.layers) {
      const std::int64_t whole = checkpoint.layer(layer)->shared.intermediate_size;
      ParallelConfig parallel;
      parallel.tp_size = 2;
      Result<MoeLayerWeights> want = checkpoint.load_layer(layer, parallel, {}, true, true);
      if (whole == 0 || !want.ok()) continue;  // a slice would cut a block
      EXPECT_EQ(want->shared->expert(0)->w2.dim(1), whole / 2) << c.directory;
      EXPECT_GT(expect_bits_of_file(c.directory, {layer}, {2}, true), 0);
      ++cut;
    }
  }
  EXPECT_GE(cut, 5);
}

// What is beside the block is looked at as what is inside, whichever tensor comes first.
TEST_F(TinyCheckpoints, UnknownTensorsOfASharedExpertBesideTheBlockAreNamed) {
  const Tensor any = Tensor::zeros(DType::kF32, {3}).value();
  for (const auto& [model, name] :
       {std::pair{"granite_shared", "model.layers.0.shared_mlp.output_linear.bias"},
        std::pair{"step3", "model.layers.0.share_expert.down_proj.pre_quant_scale"}}) {
    const std::string path = find(model).directory;
    for (const std::string prefix : {"", "language_model."}) {
      for (const bool first : {true, false}) {
        WeightLoader loader = loader_for(path, 0, {}).value();
        const std::string full = prefix + name;
        const auto unknown = [&] { return loader.load(full, any.view()).value(); };
        if (first) {
          EXPECT_TRUE(unknown());
        }
        for (const StoredTensor& t : read_all_tensors(path)) {
          ASSERT_TRUE(loader.load(prefix + t.name, t.tensor.view()).ok());
        }
        if (!first) {
          EXPECT_TRUE(unknown());
        }
        EXPECT_EQ(
            mismatch(loader.finish().status(), StatusCode::kUnsupported, {full, "not recognised"}),
            "");
      }
    }
  }
}

// The whole layer: output of a FusedMoE made from what was pushed.
TEST(PushedModels, GiveTheOutputOfTheFile) {
  for (const char* name : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    SCOPED_TRACE(name);
    const std::string path = test::bundled_model(name);
    const Checkpoint checkpoint = must_open(path);
    const MoeLayerSpec spec = checkpoint.layers()[0];
    const std::vector<StoredTensor> tensors = read_all_tensors(path);
    Tensor x = Tensor::uninitialized(DType::kF32, {5, spec.hidden_size}).value();
    for (std::int64_t i = 0; i < 5 * spec.hidden_size; ++i) {
      x.as<float>()[i] = std::sin(static_cast<float>(i));
    }
    FusedMoE::Options options;
    options.num_threads = 1;
    WeightLoader loader = loader_for(path, spec.layer, {}).value();
    ASSERT_TRUE(push(loader, tensors, 17).ok());
    const FusedMoE pushed = FusedMoE::create(loader.finish().value(), options).value();
    const FusedMoE file = FusedMoE::from_checkpoint(checkpoint, spec.layer, options).value();
    Tensor got = Tensor::zeros(DType::kF32, x.shape()).value();
    Tensor want = Tensor::zeros(DType::kF32, x.shape()).value();
    ASSERT_TRUE(pushed.forward(x.view(), got.view()).ok());
    ASSERT_TRUE(file.forward(x.view(), want.view()).ok());
    EXPECT_EQ(bytes_of(got.view()), bytes_of(want.view()));
    EXPECT_NE(bytes_of(got.view()), std::string(static_cast<std::size_t>(got.bytes()), '\0'));
  }
}

TEST(PushedModels, GiveTheBitsOfTheFile) {
  for (const char* name : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    const std::string path = test::bundled_model(name);
    EXPECT_GT(expect_bits_of_file(path, {must_open(path).layers()[0].layer}, {2}), 0);
  }
  for (const char* name : {"tiny-gpt-oss-mxfp4", "tiny-deepseek-v3-fp8"}) {
    const std::string path = test::extra_model(name);
    if (!std::filesystem::exists(path)) continue;
    const bool even = std::string(name) != "tiny-deepseek-v3-fp8";  // a slice cuts a block
    EXPECT_GT(expect_bits_of_file(path, {must_open(path).layers()[0].layer},
                                  even ? std::vector<int>{2} : std::vector<int>{}),
              0);
  }
}

TEST(PushedModels, GiveTheBitsOfTheFileFromAGpu) {
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason;
  for (const char* name : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    SCOPED_TRACE(name);
    const std::string path = test::bundled_model(name);
    const Checkpoint checkpoint = must_open(path);
    const int layer = checkpoint.layers()[0].layer;
    WeightLoader::Options options;
    options.parallel.ep_size = 2;
    options.parallel.ep_rank = 1;
    WeightLoader loader = loader_for(path, layer, options).value();
    for (const StoredTensor& t : read_all_tensors(path)) {
      const DeviceTensor there = DeviceTensor::copy_of(t.tensor.view(), Device::cuda(0)).value();
      const Result<bool> kept = loader.load(t.name, there.view());
      EXPECT_TRUE(kept.ok()) << kept.status().to_string();
    }
    MoeLayerWeights got = loader.finish().value();
    MoeLayerWeights want = checkpoint.load_layer(layer, options.parallel).value();
    EXPECT_EQ(weights_difference(got, want, want.spec.num_experts / 2), "");
  }
}

}  // namespace
}  // namespace moesaic::test
