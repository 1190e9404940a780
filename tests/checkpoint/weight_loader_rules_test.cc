// What a WeightLoader takes, refuses and keeps: docs/spec/checkpoints.md section 6.5. The rules of the
// decision list in section 6.2 and their cases:
//   1   MXFP4 of all experts                       uneven_slices_test.cc, PushedFormats
//   2   not local: false                           TensorsOfOthersAreAnsweredWithFalse
//       numbers of all experts                     NumbersThatDecideForAllRanksAreAskedForOnEvery
//   3   packed words, transposed                   PushedFormats (GPTQ, AWQ, compressed-tensors)
//   4   w1, w2, w3                                 UnknownTensorsOfTheBlockAreNamed (w4)
//   5   GGUF types                                 PushedFormats (gguf_*)
//   6   bitsandbytes                               PushedFormats (bnb_*)
//   7   slices, rank 3, fused and transposed       HandMadeLayers, PushedTensorsGiveTheBitsOfTheFile
//   8   input scales                               NumbersThatDecide..., PushedFormats
//   9   group indices                              PushedFormats (act-order)
//   10  ModelOpt, one tensor or [E, 2]             PushedFormats (modelopt_*, stacked_*)
//   11  scales and zeros of every granularity      PushedFormats
//   12  weight_shape                               PushedFormats (pack-quantized)
//   13  weights                                    all
//   14  everything else: biases are kept, other names refused: UnknownTensorsOfTheBlockAreNamed
// PushedFormats and PushedTensorsGiveTheBitsOfTheFile are in weight_loader_test.cc.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/pushing.h"
#include "moesaic/weight_loader.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kExperts = 4, kHidden = 6, kWidth = 8;
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

WeightLoader::Options ranks(int tp, int tp_rank, int ep, int ep_rank) {
  WeightLoader::Options options;
  options.parallel.tp_size = tp;
  options.parallel.tp_rank = tp_rank;
  options.parallel.ep_size = ep;
  options.parallel.ep_rank = ep_rank;
  return options;
}

const StoredTensor& find(const std::vector<StoredTensor>& all, const std::string& name) {
  for (const StoredTensor& t : all) {
    if (t.name == name) return t;
  }
  throw std::out_of_range(name);
}

std::vector<float> floats(const ConstTensorView& view) {
  const auto* data = view.as<float>();
  return {data, data + view.shape.num_elements().value()};
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
        {"w2.weight", DType::kU8, {kHidden, kWidth}, StatusCode::kInvalidDType, {"U8", "F32"}}};
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
  const ConstTensorView device(t.data(), DType::kF32, {kWidth, kHidden}, Device::cuda(0));
  EXPECT_EQ(mismatch(loader.load(name, device).status(), StatusCode::kInvalidArgument, {name}), "");
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

// One layer in every storage that somebody may hold it in: the same experts.
class HandMadeLayers : public testing::TestWithParam<ExpertStorage> {
 protected:
  static float value(std::int64_t e, int projection, std::int64_t row, std::int64_t col) {
    return static_cast<float>(1000 * e + 200 * projection + 10 * row + col);
  }
  // Element (e, projection, row, col) of the linears at every place of the tensor.
  template <class At>
  static Tensor fill(const Shape& shape, At at) {
    Tensor t = Tensor::uninitialized(DType::kF32, shape).value();
    const std::int64_t inner = shape[shape.rank() - 1];
    for (std::int64_t i = 0; i < shape.num_elements().value(); ++i) {
      t.as<float>()[i] = at(i / inner, i % inner);
    }
    return t;
  }
};

TEST_P(HandMadeLayers, HaveTheExpertsThatWerePushed) {
  const ExpertStorage storage = GetParam();
  const std::int64_t n = kExperts, h = kHidden, w = kWidth;
  ExpertNames names;
  names.block = "decoder.blocks.7.moe";
  names.storage = storage;
  names.weight_suffix = ".kernel";
  const bool single =
      storage == ExpertStorage::kPerExpert || storage == ExpertStorage::kPerExpertUpFirst;
  names.gate = single ? "expert{e}.gate" : "gate";
  names.up = single ? "expert{e}.up" : "up";
  names.down = single ? "expert{e}.down" : "down";
  std::vector<StoredTensor> all;
  const auto add = [&](const std::string& leaf, Tensor t) {
    all.push_back({names.block + "." + leaf + ".kernel", std::move(t)});
  };
  const auto in_turn = [&](std::int64_t e, std::int64_t r, std::int64_t c) {
    return value(e, static_cast<int>(r % 2), r / 2, c);
  };
  const auto halves = [&](std::int64_t e, std::int64_t r, std::int64_t c) {
    return value(e, r < w ? 0 : 1, r % w, c);
  };
  switch (storage) {
    case ExpertStorage::kPerExpert:
    case ExpertStorage::kPerExpertUpFirst:
      for (std::int64_t e = 0; e < n; ++e) {
        const std::string p = "expert" + std::to_string(e) + ".";
        if (storage == ExpertStorage::kPerExpert) {
          add(p + "gate", fill({w, h}, [&](auto r, auto c) { return value(e, 0, r, c); }));
          add(p + "up", fill({w, h}, [&](auto r, auto c) { return value(e, 1, r, c); }));
        } else {
          add(p + "gate",
              fill({2 * w, h}, [&](auto r, auto c) { return value(e, r < w ? 1 : 0, r % w, c); }));
        }
        add(p + "down", fill({h, w}, [&](auto r, auto c) { return value(e, 2, r, c); }));
      }
      break;
    case ExpertStorage::kStacked:
      add("gate", fill({n, w, h}, [&](auto r, auto c) { return value(r / w, 0, r % w, c); }));
      add("up", fill({n, w, h}, [&](auto r, auto c) { return value(r / w, 1, r % w, c); }));
      add("down", fill({n, h, w}, [&](auto r, auto c) { return value(r / h, 2, r % h, c); }));
      break;
    case ExpertStorage::kFlat:
      add("gate", fill({n * w, h}, [&](auto r, auto c) { return value(r / w, 0, r % w, c); }));
      add("up", fill({n * w, h}, [&](auto r, auto c) { return value(r / w, 1, r % w, c); }));
      add("down", fill({n * w, h}, [&](auto r, auto c) { return value(r / w, 2, c, r % w); }));
      break;
    case ExpertStorage::kFusedNT:
    case ExpertStorage::kFusedNTInterleaved:
      add("gate", fill({n, 2 * w, h}, [&](auto r, auto c) {
            const auto e = r / (2 * w), row = r % (2 * w);
            return storage == ExpertStorage::kFusedNT ? halves(e, row, c) : in_turn(e, row, c);
          }));
      add("down", fill({n, h, w}, [&](auto r, auto c) { return value(r / h, 2, r % h, c); }));
      break;
    default:
      add("gate", fill({n, h, 2 * w}, [&](auto r, auto c) {
            const auto e = r / h, col = r % h;
            return storage == ExpertStorage::kFusedNN ? halves(e, c, col) : in_turn(e, c, col);
          }));
      add("down", fill({n, w, h}, [&](auto r, auto c) { return value(r / w, 2, c, r % w); }));
  }
  const bool fused = storage != ExpertStorage::kPerExpert && storage != ExpertStorage::kStacked &&
                     storage != ExpertStorage::kFlat;
  if (fused) names.up.clear();

  MoeLayerSpec spec;
  spec.layer = 7;
  spec.hidden_size = h;
  spec.intermediate_size = w;
  spec.num_experts = spec.routing.num_experts = n;
  spec.routing.top_k = 2;
  spec.activation = make_activation("silu").value();
  spec.activation_dtype = DType::kF32;
  for (const int tp : {1, 2}) {
    for (int rank = 0; rank < tp; ++rank) {
      Result<WeightLoader> loader = WeightLoader::from_spec(spec, names, "", ranks(tp, rank, 1, 0));
      ASSERT_TRUE(loader.ok()) << loader.status().to_string();
      const Status pushed = push(*loader, all, 6);
      ASSERT_TRUE(pushed.ok()) << pushed.to_string();
      EXPECT_EQ(loader->bytes(), n * 3 * w * h * 4 / tp);
      Result<MoeLayerWeights> got = loader->finish();
      ASSERT_TRUE(got.ok()) << got.status().to_string();
      EXPECT_EQ(got->spec.quant.name, "f32");
      const std::int64_t part = w / tp, first = part * rank;
      for (std::int64_t e = 0; e < n; ++e) {
        const ExpertWeightsView v = got->experts->expert(e).value();
        std::vector<float> w13, w2;
        for (int projection = 0; projection < 2; ++projection) {
          for (std::int64_t r = 0; r < part; ++r) {
            for (std::int64_t c = 0; c < h; ++c) {
              w13.push_back(value(e, projection, first + r, c));
            }
          }
        }
        for (std::int64_t r = 0; r < h; ++r) {
          for (std::int64_t c = 0; c < part; ++c) w2.push_back(value(e, 2, r, first + c));
        }
        EXPECT_EQ(floats(v.w13), w13);
        EXPECT_EQ(floats(v.w2), w2);
      }
    }
  }
}

// FP8 blocks of which the last is a part of one: rows of scales follow each other within gate and up.
TEST(HandMadeFp8, BlocksMayEndRagged) {
  constexpr std::int64_t h = 200, w = 72;
  ExpertNames names;
  names.block = "moe";
  names.gate = "expert{e}.gate";
  names.up = "expert{e}.up";
  names.down = "expert{e}.down";
  std::vector<StoredTensor> all;
  float next = 1;
  const auto add = [&](const std::string& leaf, std::int64_t rows, std::int64_t columns) {
    Tensor weight = Tensor::zeros(DType::kF8E4M3, {rows, columns}).value();
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      weight.as<std::uint8_t>()[i] =
          static_cast<std::uint8_t>((i + static_cast<std::int64_t>(all.size())) % 0x70);
    }
    Tensor scale = Tensor::zeros(DType::kF32, {(rows + 127) / 128, (columns + 127) / 128}).value();
    for (std::int64_t i = 0; i < scale.bytes() / 4; ++i) scale.as<float>()[i] = next++;
    all.push_back({"moe.expert0." + leaf + ".weight", std::move(weight)});
    all.push_back({"moe.expert0." + leaf + ".weight_scale_inv", std::move(scale)});
  };
  add("gate", w, h);
  add("up", w, h);
  add("down", h, w);
  MoeLayerSpec spec;
  spec.hidden_size = h;
  spec.intermediate_size = w;
  spec.num_experts = spec.routing.num_experts = spec.routing.top_k = 1;
  spec.activation = make_activation("silu").value();
  const char* const quant =
      R"({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"})";
  Result<WeightLoader> loader = WeightLoader::from_spec(spec, names, quant, {});
  ASSERT_TRUE(loader.ok()) << loader.status().to_string();
  const Status pushed = push(*loader, all, 3);
  ASSERT_TRUE(pushed.ok()) << pushed.to_string();
  Result<MoeLayerWeights> got = loader->finish();
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  const Result<ExpertWeightsView> v = got->experts->expert(0);
  ASSERT_TRUE(v.ok()) << v.status().to_string();
  EXPECT_EQ(floats(v->w13_scale), (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(floats(v->w2_scale), (std::vector<float>{5, 6}));
  EXPECT_EQ(std::memcmp(v->w13.data, all[0].tensor.data(), w * h), 0);
  EXPECT_EQ(std::memcmp(v->w13.data + w * h, all[2].tensor.data(), w * h), 0);
  EXPECT_EQ(std::memcmp(v->w2.data, all[4].tensor.data(), w * h), 0);
}

INSTANTIATE_TEST_SUITE_P(Storages, HandMadeLayers,
                         testing::Values(ExpertStorage::kPerExpert,
                                         ExpertStorage::kPerExpertUpFirst, ExpertStorage::kStacked,
                                         ExpertStorage::kFlat, ExpertStorage::kFusedNT,
                                         ExpertStorage::kFusedNN,
                                         ExpertStorage::kFusedNNInterleaved,
                                         ExpertStorage::kFusedNTInterleaved));

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
  names.up.clear();
  refuse(spec, names, "", {"names.up", "a module"}, kInvalidArgument);
  names = {};
  names.storage = ExpertStorage::kFusedNN;
  refuse(spec, names, "", {"names.up", "none"}, kInvalidArgument);
  names = {};
  names.down = "down_proj";
  refuse(spec, names, "", {"names.down", "{e}"}, kInvalidArgument);
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
                     {"layer", "got 3"}),
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
  options = ranks(2, 2, 1, 0);
  EXPECT_EQ(mismatch(WeightLoader::from_config(mixtral_config(), 2, options).status(),
                     kInvalidArgument, {"tp_rank"}),
            "");
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
