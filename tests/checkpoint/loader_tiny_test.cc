// Every family in every storage, written by an independent script, must load to the script's
// canonical bytes: whole, in tensor-parallel slices and in expert-parallel shares.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <tuple>

#include "checkpoint/tiny_support.h"
#include "moesaic/parallel.h"
#include "quant/block_scales.h"
#include "quant/mx.h"

namespace moesaic::test {
namespace {

struct Expected {
  explicit Expected(const TinyCase& c, int layer)
      : file(must_open_file(c.expected_file)), prefix(std::to_string(layer) + ".") {}
  bool has(const std::string& name) const { return file.contains(prefix + name); }
  Tensor get(const std::string& name) const { return file.read(prefix + name).value(); }
  TensorFile file;
  std::string prefix;
};

void expect_tensor(const Tensor& got, const Expected& expected, const std::string& name) {
  ASSERT_EQ(got.present(), expected.has(name)) << name;
  if (!got.present()) return;
  const Tensor want = expected.get(name);
  EXPECT_EQ(got.dtype(), want.dtype()) << name;
  EXPECT_EQ(got.shape().to_string(), want.shape().to_string()) << name;
  EXPECT_EQ(bytes_of(got.view()), bytes_of(want.view())) << name;
}

// The shared expert, where there is one: stacked tensors with one entry, whole on every rank.
void expect_shared(const MoeLayerWeights& loaded, const Expected& expected) {
  ASSERT_EQ(loaded.shared != nullptr, expected.has("shared_w13"));
  if (!loaded.shared) return;
  const Result<ExpertWeightsView> got = loaded.shared->expert(0);
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_FALSE(loaded.shared->expert(1).ok());
  for (const auto& [name, view] :
       {std::pair{"shared_w13", got->w13}, std::pair{"shared_w2", got->w2},
        std::pair{"shared_w13_scale", got->w13_scale},
        std::pair{"shared_w2_scale", got->w2_scale}}) {
    ASSERT_EQ(view.present(), expected.has(name)) << name;
    if (!view.present()) continue;
    const Tensor want = expected.get(name);
    EXPECT_EQ(view.dtype, want.dtype()) << name;
    EXPECT_EQ(view.shape.to_string(), (Shape{want.shape()[1], want.shape()[2]}.to_string()))
        << name;
    EXPECT_EQ(bytes_of(view), bytes_of(want.view())) << name;
  }
}

void expect_bytes(ConstTensorView got, const std::string& want, DType dtype, const Shape& shape,
                  const std::string& what) {
  EXPECT_EQ(dtype_name(got.dtype), dtype_name(dtype)) << what;
  EXPECT_EQ(got.shape.to_string(), shape.to_string()) << what;
  EXPECT_TRUE(bytes_of(got) == want) << what << " differs";
}

// Expert `global` on tensor-parallel rank `rank` of `tp`, cut out of the expected stacked tensors.
void expect_expert(const ExpertWeightsView& got, const Expected& expected, std::int64_t global,
                   int tp, int rank) {
  const Tensor w13 = expected.get("w13");
  const Tensor w2 = expected.get("w2");
  const std::int64_t h = w2.shape()[1];
  const std::int64_t i = w2.shape()[2];
  const std::int64_t ip = i / tp;
  const std::int64_t at = rank * ip;
  const std::string e = "expert " + std::to_string(global) + " rank " + std::to_string(rank) + " ";
  const bool gated = w13.shape()[1] == 2 * i;
  std::string w13_bytes = sub_matrix(w13, global, at, ip, 0, h);
  if (gated) w13_bytes += sub_matrix(w13, global, i + at, ip, 0, h);
  expect_bytes(got.w13, w13_bytes, w13.dtype(), {gated ? 2 * ip : ip, h}, e + "w13");
  expect_bytes(got.w2, sub_matrix(w2, global, 0, h, at, ip), w2.dtype(), {h, ip}, e + "w2");

  ASSERT_EQ(got.w13_scale.present(), expected.has("w13_scale"));
  if (w13.dtype() == DType::kF4E2M1) {  // a scale per row and 32 columns
    const Tensor s13 = expected.get("w13_scale");
    const Tensor s2 = expected.get("w2_scale");
    expect_bytes(got.w13_scale,
                 sub_matrix(s13, global, at, ip, 0, h / quant::kMxGroupSize) +
                     sub_matrix(s13, global, i + at, ip, 0, h / quant::kMxGroupSize),
                 DType::kF8E8M0, {2 * ip, h / quant::kMxGroupSize}, e + "w13_scale");
    expect_bytes(got.w2_scale,
                 sub_matrix(s2, global, 0, h, at / quant::kMxGroupSize, ip / quant::kMxGroupSize),
                 DType::kF8E8M0, {h, ip / quant::kMxGroupSize}, e + "w2_scale");
  } else if (got.w13_scale.present()) {
    const Tensor s13 = expected.get("w13_scale");
    const Tensor s2 = expected.get("w2_scale");
    const std::int64_t hb = s2.shape()[1];
    const std::int64_t ib = s2.shape()[2];
    const std::int64_t b = ip / quant::kFp8BlockSize;
    const std::int64_t first = at / quant::kFp8BlockSize;
    expect_bytes(
        got.w13_scale,
        sub_matrix(s13, global, first, b, 0, hb) + sub_matrix(s13, global, ib + first, b, 0, hb),
        DType::kF32, {2 * b, hb}, e + "w13_scale");
    expect_bytes(got.w2_scale, sub_matrix(s2, global, 0, hb, first, b), DType::kF32, {hb, b},
                 e + "w2_scale");
  }
  ASSERT_EQ(got.w13_bias.present(), expected.has("w13_bias"));
  if (got.w13_bias.present()) {
    const Tensor b13 = expected.get("w13_bias");
    const Tensor b2 = expected.get("w2_bias");
    const std::string row = bytes_of(b13.view())
                                .substr(static_cast<std::size_t>(global * 2 * i * 4),
                                        static_cast<std::size_t>(2 * i * 4));
    const auto part = [&](std::int64_t from) {
      return row.substr(static_cast<std::size_t>(from * 4), static_cast<std::size_t>(ip * 4));
    };
    expect_bytes(got.w13_bias, part(at) + part(i + at), DType::kF32, {2 * ip}, e + "w13_bias");
    std::string bias2 = bytes_of(b2.view()).substr(static_cast<std::size_t>(global * h * 4),
                                                   static_cast<std::size_t>(h * 4));
    if (rank != 0) bias2.assign(bias2.size(), '\0');  // summed over ranks it counts once
    expect_bytes(got.w2_bias, bias2, DType::kF32, {h}, e + "w2_bias");
  }
}

std::string number(const std::string& pattern, int i) {
  std::string text = pattern;
  return text.replace(text.find("%d"), 2, std::to_string(i));
}

TEST_F(TinyCheckpoints, ConfigurationsAreReadAsTheFamilySays) {
  for (const TinyCase& c : cases()) {
    SCOPED_TRACE(c.name);
    const Checkpoint checkpoint = must_open(c.directory);
    EXPECT_EQ(checkpoint.problems(), std::vector<std::string>());
    std::vector<int> layers;
    for (const MoeLayerSpec& spec : checkpoint.layers()) {
      layers.push_back(spec.layer);
      EXPECT_EQ(spec.prefix, number(c.prefix, spec.layer));
      nlohmann::json want = c.spec;
      if (want.contains("of_layer")) {
        want.update(want["of_layer"].value(std::to_string(spec.layer), nlohmann::json::object()));
      }
      EXPECT_EQ(routing_method_name(spec.routing.method), want["routing"].get<std::string>());
      EXPECT_EQ(scoring_func_name(spec.routing.scoring_func), want["scoring"].get<std::string>());
      EXPECT_EQ(spec.routing.renormalize, want["renormalize"].get<bool>());
      EXPECT_EQ(spec.routing.routed_scaling_factor, want["scale"].get<double>());
      EXPECT_EQ(spec.routing.scale_on_output, want.value("scale_on_output", false));
      EXPECT_EQ(spec.routing.num_zero_experts, want.value("zero_experts", 0));
      EXPECT_EQ(spec.routing.p_norm, want.value("p_norm", 1.0));
      EXPECT_EQ(spec.routing.jitter_eps, want.value("jitter", 0.01));
      EXPECT_EQ(spec.routing.renorm_floor, want.value("renorm_floor", 0.0));
      EXPECT_EQ(spec.routing.renorm_epsilon, want.value("renorm_epsilon", 0.0));
      EXPECT_EQ(spec.routing.has_correction_bias, want.value("bias", false));
      const auto groups = want.value("groups", std::vector<std::int64_t>{1, 1});
      EXPECT_EQ(spec.routing.num_expert_group, groups[0]);
      EXPECT_EQ(spec.routing.topk_group, groups[1]);
      EXPECT_EQ(spec.routing.top_k, want.value("top_k", 2));
      EXPECT_EQ(spec.routing.num_experts, 4);
      EXPECT_EQ(spec.num_experts, 4);
      EXPECT_EQ(spec.shared.intermediate_size, want.value("shared", 0));
      EXPECT_EQ(spec.shared.gated_output, want.value("shared_gated", false));
      EXPECT_EQ(spec.quant.name, want.value("quant", "bf16"));
      EXPECT_EQ(spec.quant.activation.scale_format == ScaleFormat::kE8M0,
                want.value("ue8m0", false));
      EXPECT_EQ(dtype_name(spec.activation_dtype), want.value("activation_dtype", "BF16"));
      EXPECT_EQ(activation_name(spec.activation.kind), want.value("activation", "silu"));
      EXPECT_EQ(spec.activation.limit, want.value("limit", std::numeric_limits<float>::infinity()));
      EXPECT_EQ(spec.activation.alpha, want.value("alpha", 1.0F));
      EXPECT_EQ(spec.activation.beta, want.value("beta", 0.0F));
      EXPECT_EQ(spec.activation.up_limit, want.value("up_limit", 0.0F));
      EXPECT_EQ(spec.has_expert_bias, want.value("expert_bias", false));
      EXPECT_EQ(spec.has_router_bias, want.value("router_bias", false));
      EXPECT_EQ(spec.apply_router_weight_on_input, want.value("weight_on_input", false));
      EXPECT_EQ(spec.shared.beside_block, want.value("beside_block", false));
      EXPECT_EQ(spec.shared.activation.value_or(ActivationSpec{}).limit,
                want.value("shared_limit", std::numeric_limits<float>::infinity()));
      EXPECT_EQ(spec.routing.group_by_best_two, want.value("best_two", false));
      EXPECT_EQ(spec.routing.has_expert_scale, want.value("expert_scale", false));
      EXPECT_EQ(spec.input_norm_eps, want.value("input_norm_eps", 0.0));
      EXPECT_TRUE(validate(spec).ok());
    }
    EXPECT_EQ(layers, c.layers);
  }
}

// What the configuration denies is not read, and problems() says so.
TEST_F(TinyCheckpoints, ExpertsInDenseLayersAreAProblem) {
  for (const auto& [name, field, value, dense] :
       {std::tuple{"deepseek_v3", "first_k_dense_replace", 2, "dense: 1"},
        std::tuple{"qwen3_moe_fused", "decoder_sparse_step", 2, "dense: 0"},
        std::tuple{"jamba", "expert_layer_period", 4, "dense: 3"},
        std::tuple{"kimi_nested", "first_k_dense_replace", 2, "dense: 1"}}) {
    const TinyCase& c = find(name);
    const TempDir dir;
    std::filesystem::copy(c.directory, dir.path("model"));
    std::ifstream before(dir.path("model/config.json"));
    nlohmann::json config = nlohmann::json::parse(before);
    (config.contains("text_config") ? config["text_config"] : config)[field] = value;
    std::ofstream(dir.path("model/config.json")) << config.dump();
    const std::vector<std::string> problems = must_open(dir.path("model")).problems();
    ASSERT_EQ(problems.size(), 1U) << name;
    EXPECT_TRUE(problems[0].ends_with(dense)) << problems[0];
  }
}

TEST_F(TinyCheckpoints, LoadToCanonicalBytes) {
  for (const TinyCase& c : cases()) {
    for (const FileAccess access : {FileAccess::kMmap, FileAccess::kCopy}) {
      SCOPED_TRACE(c.name);
      const Checkpoint checkpoint = must_open(c.directory, access);
      for (const int layer : c.layers) {
        SCOPED_TRACE(layer);
        const Expected expected(c, layer);
        Result<MoeLayerWeights> loaded = checkpoint.load_layer(layer, ParallelConfig{});
        ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
        const MoeLayerTensors& t = loaded->tensors;
        const Result<MoeLayerFormat> format = checkpoint.check_layer(layer);
        ASSERT_TRUE(format.ok()) << format.status().to_string();
        EXPECT_EQ(format->spec.quant.name, loaded->spec.quant.name);
        EXPECT_EQ(format->spec.quant.weight, loaded->spec.quant.weight);
        EXPECT_EQ(format->spec.activation_dtype, loaded->spec.activation_dtype);
        EXPECT_EQ(format->gate_dtype, t.gate_weight.dtype());
        EXPECT_EQ(format->shared_quant.name, loaded->shared_quant.name);
        expect_tensor(t.gate_weight, expected, "gate_weight");
        expect_tensor(t.gate_bias, expected, "gate_bias");
        expect_tensor(t.e_score_correction_bias, expected, "e_score_correction_bias");
        expect_tensor(t.hash_table, expected, "hash_table");
        expect_tensor(t.experts_norm_weight, expected, "experts_norm_weight");
        expect_tensor(t.expert_scale, expected, "expert_scale");
        expect_tensor(t.shared_gate_weight, expected, "shared_gate");
        expect_shared(*loaded, expected);
        if (loaded->shared) {
          EXPECT_EQ(loaded->shared_quant.name, c.spec.value("shared_quant", "bf16"));
        } else {
          EXPECT_EQ(loaded->shared_quant.name, loaded->spec.quant.name);
        }
        for (std::int64_t e = 0; e < 4; ++e) {
          const Result<ExpertWeightsView> got = loaded->experts->expert(e);
          ASSERT_TRUE(got.ok()) << got.status().to_string();
          expect_expert(*got, expected, e, 1, 0);
        }
      }
    }
  }
}

TEST_F(TinyCheckpoints, TensorParallelSlicesAreTheRightRowsAndColumns) {
  for (const TinyCase& c : cases()) {
    SCOPED_TRACE(c.name);
    const Checkpoint checkpoint = must_open(c.directory);
    const int layer = c.layers.back();
    const Expected expected(c, layer);
    for (const int tp : {2, 4}) {
      const bool fp8 = c.spec.value("quant", "") == "fp8-block";
      for (int rank = 0; rank < tp; ++rank) {
        ParallelConfig parallel;
        parallel.tp_size = tp;
        parallel.tp_rank = rank;
        Result<MoeLayerWeights> loaded = checkpoint.load_layer(layer, parallel);
        if (fp8 && tp == 4) {  // I = 256: 64 rows are half a block
          EXPECT_EQ(mismatch(loaded.status(), StatusCode::kInvalidArgument,
                             {"intermediate_size", "64", "256", "tp_size 4", "block 128"}),
                    "");
          continue;
        }
        ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
        EXPECT_EQ(loaded->spec.intermediate_size, expected.get("w2").shape()[2]);
        expect_shared(*loaded, expected);
        for (const std::int64_t e : {3, 0, 2, 1}) {  // any order
          const Result<ExpertWeightsView> got = loaded->experts->expert(e);
          ASSERT_TRUE(got.ok()) << got.status().to_string();
          expect_expert(*got, expected, e, tp, rank);
        }
      }
    }
  }
}

TEST_F(TinyCheckpoints, ExpertParallelSharesCoverEveryExpertOnce) {
  for (const TinyCase& c : cases()) {
    SCOPED_TRACE(c.name);
    const Checkpoint checkpoint = must_open(c.directory);
    const int layer = c.layers.front();
    const Expected expected(c, layer);
    for (const ExpertPlacement placement :
         {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
      for (const int ep : {2, 3, 6}) {  // 6 > E: some ranks own nothing
        std::map<std::int64_t, int> seen;
        for (int rank = 0; rank < ep; ++rank) {
          ParallelConfig parallel;
          parallel.ep_size = ep;
          parallel.ep_rank = rank;
          parallel.placement = placement;
          const std::vector<std::int64_t> ids = local_expert_ids(4, parallel).value();
          Result<MoeLayerWeights> loaded = checkpoint.load_layer(layer, parallel);
          ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
          for (std::size_t local = 0; local < ids.size(); ++local) {
            const auto got = loaded->experts->expert(static_cast<std::int64_t>(local));
            ASSERT_TRUE(got.ok()) << got.status().to_string();
            expect_expert(*got, expected, ids[local], 1, 0);
            ++seen[ids[local]];
          }
          const auto beyond = loaded->experts->expert(static_cast<std::int64_t>(ids.size()));
          EXPECT_EQ(mismatch(beyond.status(), StatusCode::kInvalidArgument, {"local_expert"}), "");
          EXPECT_EQ(loaded->experts->expert(-1).status().code(), StatusCode::kInvalidArgument);
        }
        EXPECT_EQ(seen, (std::map<std::int64_t, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}}));
      }
    }
  }
}

// One set of weights, every storage: the script's expectations must be equal, so that loading as
// expected, tested above, means that the storages are equivalent.
TEST_F(TinyCheckpoints, StoragesOfTheSameWeightsAgree) {
  const std::vector<std::vector<std::string>> same = {
      {"mixtral", "granite", "llama4", "dbrx", "step3", "mixtral_fused", "mixtral_fused_weight",
       "mixtral_fused_block"},
      {"qwen3_moe", "qwen3_moe_fused"},
      {"qwen2_moe", "qwen2_moe_fused"},
      {"deepseek_v3", "deepseek_v3_fused"},
      {"fp8", "fp8_fused"},
  };
  for (const auto& group : same) {
    for (const std::string& name : group) {
      const int layer = find(name).layers[0];
      const Tensor want = Expected(find(group[0]), layer).get("w13");
      const Tensor got = Expected(find(name), layer).get("w13");
      EXPECT_TRUE(bytes_of(got.view()) == bytes_of(want.view())) << name;
      EXPECT_EQ(must_open(find(name).directory).load_layer(layer, {}).status().to_string(), "ok");
    }
  }
}

TEST_F(TinyCheckpoints, ProgressRisesToTheTotal) {
  for (const char* name : {"deepseek_v3", "fp8", "gpt_oss"}) {
    const TinyCase& c = find(name);
    const Checkpoint checkpoint = must_open(c.directory);
    std::int64_t last = -1;
    std::int64_t total = -1;
    int calls = 0;
    const ProgressFn progress = [&](std::int64_t done, std::int64_t all) {
      EXPECT_GT(done, last);
      EXPECT_LE(done, all);
      if (total >= 0) {
        EXPECT_EQ(all, total);
      }
      last = done;
      total = all;
      ++calls;
    };
    Result<MoeLayerWeights> loaded = checkpoint.load_layer(c.layers[0], {}, progress);
    ASSERT_TRUE(loaded.ok());
    for (std::int64_t e = 0; e < 4; ++e) ASSERT_TRUE(loaded->experts->expert(e).ok());
    EXPECT_EQ(calls, 5);
    // Biases are widened, so that gpt-oss delivers more bytes than it reads.
    EXPECT_EQ(last, total) << name;
    EXPECT_EQ(total, checkpoint.layer_bytes(c.layers[0])) << name;
  }
}

TEST_F(TinyCheckpoints, SourceOutlivesItsCheckpointAndReusesOneBuffer) {
  const TinyCase& c = find("gpt_oss");
  std::unique_ptr<ExpertSource> source;
  {
    const Checkpoint checkpoint = must_open(c.directory);
    source = std::move(checkpoint.load_layer(0, {})->experts);
  }
  const ExpertWeightsView first = source->expert(0).value();
  const std::byte* staging = first.w13.data;
  const ExpertWeightsView last = source->expert(3).value();
  EXPECT_EQ(last.w13.data, staging);
  expect_expert(last, Expected(c, 0), 3, 1, 0);
}

TEST_F(TinyCheckpoints, LookUpsNameWhatExists) {
  const Checkpoint checkpoint = must_open(find("qwen3_moe_step").directory);
  EXPECT_EQ(checkpoint.model_type(), "qwen3_moe");
  EXPECT_TRUE(checkpoint.layer(5).ok());
  EXPECT_EQ(
      mismatch(checkpoint.layer(3).status(), StatusCode::kNotFound, {"layer", "got 3", "1, 5"}),
      "");
  EXPECT_EQ(mismatch(checkpoint.load_layer(0, {}).status(), StatusCode::kNotFound, {"1, 5"}), "");
  EXPECT_EQ(mismatch(checkpoint.check_layer(-1).status(), StatusCode::kNotFound, {"-1", "1, 5"}),
            "");
  EXPECT_EQ(checkpoint.layer_bytes(0), 0);
  EXPECT_TRUE(checkpoint.read_tensor("model.norm.weight").ok());
  EXPECT_EQ(mismatch(checkpoint.read_tensor("model.nrm.weight").status(), StatusCode::kNotFound,
                     {"model.nrm.weight", "nearest is model.norm.weight"}),
            "");
  ParallelConfig parallel;
  parallel.tp_size = 3;
  EXPECT_EQ(mismatch(checkpoint.load_layer(1, parallel).status(), StatusCode::kInvalidArgument,
                     {"intermediate_size", "got 8", "tp_size 3"}),
            "");
  EXPECT_EQ(mismatch(checkpoint.check_layer(1, parallel).status(), StatusCode::kInvalidArgument,
                     {"intermediate_size", "got 8", "tp_size 3"}),
            "");
  parallel.tp_rank = 3;
  EXPECT_EQ(mismatch(checkpoint.load_layer(1, parallel).status(), StatusCode::kInvalidArgument,
                     {"tp_rank"}),
            "");
}

}  // namespace
}  // namespace moesaic::test
