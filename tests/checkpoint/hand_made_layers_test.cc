// Layers that a caller describes by a spec and names of its own: every storage of linears, FP8
// blocks that end ragged, names that differ. docs/spec/checkpoints.md section 6.2, rules 7 and 11.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/pushing.h"
#include "checkpoint/small_layer.h"
#include "moesaic/weight_loader.h"

namespace moesaic::test {
namespace {

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

// One that is copied from the line above and not changed would be two projections.
TEST(HandMadeNames, EveryTensorOfADescriptionHasANameOfItsOwn) {
  MoeLayerSpec spec;
  spec.hidden_size = spec.intermediate_size = kWidth;
  spec.num_experts = spec.routing.num_experts = 12;
  spec.activation = make_activation("silu").value();
  ExpertNames same, numbers, suffixes;
  same.up = same.gate;
  numbers.gate = "g{e}";  // of expert 10, and up of expert 0
  numbers.up = "g1{e}";
  suffixes.scale_suffix = suffixes.weight_suffix;
  EXPECT_TRUE(WeightLoader::from_spec(spec, suffixes, "", {}).ok());  // which has no scales
  const std::string_view fp8 = R"({"quant_method": "fp8", "weight_block_size": [128, 128]})";
  for (const auto& [names, quant, doubled] :
       {std::tuple<ExpertNames, std::string_view, std::string_view>{
            same, "", "mlp.experts.0.gate_proj.weight"},
        {numbers, "", "mlp.g10.weight"},
        {suffixes, fp8, "mlp.experts.0.gate_proj.weight"}}) {
    EXPECT_EQ(mismatch(WeightLoader::from_spec(spec, names, quant, {}).status(),
                       StatusCode::kInvalidArgument, {"names", std::string(doubled), "two"}),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Storages, HandMadeLayers,
                         testing::Values(ExpertStorage::kPerExpert,
                                         ExpertStorage::kPerExpertUpFirst, ExpertStorage::kStacked,
                                         ExpertStorage::kFlat, ExpertStorage::kFusedNT,
                                         ExpertStorage::kFusedNN,
                                         ExpertStorage::kFusedNNInterleaved,
                                         ExpertStorage::kFusedNTInterleaved));

}  // namespace
}  // namespace moesaic::test
