// Parts of the tool that its output shows only indirectly: exit codes, shapes, the float64 oracle
// of the choice of experts.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bench_plot.h"
#include "chart.h"
#include "console.h"
#include "exit_code.h"
#include "golden.h"
#include "layer_io.h"
#include "options.h"
#include "routing_oracle.h"
#include "shapes.h"
#include "support/random.h"

namespace moesaic::tool {
namespace {

TEST(ExitCode, EveryStatusCodeHasOne) {
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    for (const Origin origin : {Origin::kFile, Origin::kOption}) {
      const auto status = static_cast<StatusCode>(code);
      EXPECT_EQ(exit_code(status, origin) == kExitOk, status == StatusCode::kOk);
      EXPECT_NE(exit_code(status, origin), kExitVerifyFailed);
      EXPECT_STRNE(next_step(status, origin), "");
    }
  }
  // The same for safetensors, GGUF and config.json.
  const std::string corrupt = next_step(StatusCode::kCorruptFile, Origin::kFile);
  EXPECT_NE(corrupt.find("the file is damaged or was written wrongly"), std::string::npos);
  EXPECT_EQ(corrupt.find("safetensors"), std::string::npos);
  EXPECT_EQ(exit_code(StatusCode::kNotFound, Origin::kFile), kExitBadInput);
  EXPECT_EQ(exit_code(StatusCode::kNotFound, Origin::kOption), kExitUsage);
  EXPECT_EQ(exit_code(StatusCode::kCorruptFile, Origin::kOption), kExitBadInput);
  EXPECT_EQ(exit_code(StatusCode::kUnsupported, Origin::kFile), kExitUnsupported);
  EXPECT_EQ(exit_code(StatusCode::kOutOfMemory, Origin::kFile), kExitDevice);
}

TEST(BenchPlot, EveryPointLiesInTheFrameAndTheFirstSeriesIsDrawnLast) {
  const PlotSeries ours{"ours", {{1, 12.5}, {512, 203}, {8192, 450}}};
  const PlotSeries peer{"peer & co", {{1, 23}, {8192, 0}}};  // a time of 0 is no time
  const std::string svg =
      bench_svg("title", "about", {ours, peer}, {"floor", {{1, 11}, {8192, 430}}});
  EXPECT_NE(svg.find("peer &amp; co"), std::string::npos);
  EXPECT_LT(svg.find("#d1495b\" stroke-width=\"1.5\""), svg.find("#1f6fb4\" stroke-width=\"3\""));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  std::size_t circles = 0;
  for (std::size_t at = svg.find("<circle cx=\""); at != std::string::npos;
       at = svg.find("<circle cx=\"", at + 1)) {
    double x = 0, y = 0;
    ASSERT_EQ(std::sscanf(svg.c_str() + at, "<circle cx=\"%lf\" cy=\"%lf\"", &x, &y), 2);
    EXPECT_TRUE(x >= 80 && x <= 640 && y >= 70 && y <= 460) << x << ' ' << y;
    ++circles;
  }
  EXPECT_EQ(circles, 4U);
  EXPECT_NE(bench_svg("", "", {}, {}).find("</svg>"), std::string::npos) << "nothing to draw";
  EXPECT_EQ(best_of({ours, peer}, 1), 12.5);
  EXPECT_EQ(best_of({ours, peer}, 2), 0);
}

TEST(Console, NumbersAndUnits) {
  EXPECT_EQ(finite(1.5), 1.5);
  EXPECT_TRUE(std::isfinite(finite(NAN)));
  EXPECT_TRUE(std::isfinite(finite(INFINITY)));
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1 kB");
  EXPECT_EQ(format_bytes(999'999), "1 MB");
  EXPECT_EQ(format_bytes(1'234'567'890), "1.23 GB");
  EXPECT_EQ(format_us(1500), "1.5 ms");
}

TEST(Shapes, NamedOnesAreConsistent) {
  for (const std::string_view name : shape_names()) {
    const Result<MoeLayerSpec> spec = layer_from_shape(name);
    ASSERT_TRUE(spec.ok()) << name;
    EXPECT_TRUE(validate(*spec).ok()) << name << ": " << validate(*spec).to_string();
  }
  const Result<MoeLayerSpec> v3 = layer_from_shape("deepseek-v3");
  EXPECT_EQ(v3->num_experts, 256);
  EXPECT_EQ(v3->hidden_size, 7168);
  EXPECT_EQ(v3->intermediate_size, 2048);
  EXPECT_EQ(v3->routing.num_expert_group, 8);
  EXPECT_EQ(v3->routing.topk_group, 4);
  EXPECT_EQ(v3->routing.scoring_func, ScoringFunc::kSigmoid);
  EXPECT_TRUE(v3->routing.has_correction_bias);
  EXPECT_EQ(v3->routing.routed_scaling_factor, 2.5);
}

TEST(Shapes, Lists) {
  const Result<MoeLayerSpec> spec = layer_from_shape("16,4,256,128,relu2");
  ASSERT_TRUE(spec.ok()) << spec.status().to_string();
  EXPECT_EQ(spec->routing.top_k, 4);
  EXPECT_EQ(spec->activation.kind, ActivationKind::kRelu2NoMul);
  for (const char* bad : {"", ",", "1,1,1", "1,1,1,1,silu,x", "0,1,1,1", "1,2,1,1", "x,1,1,1",
                          "1 ,1,1,1", "99999999999999999999,1,1,1", "8,2,64,64,nonsense",
                          "8,2,64,64,situ", "8,2,64,64,swigluoai_uninterleave"}) {
    EXPECT_FALSE(layer_from_shape(bad).ok()) << "'" << bad << "'";
  }
  EXPECT_EQ(layer_from_shape("8,2,64,64,swiglustep")->activation.limit, 7.0F);
  EXPECT_EQ(layer_from_shape("8,2,64,64,swigluoai")->activation.beta, 1.0F);
  EXPECT_EQ(layer_from_shape("qwen3-30").status().code(), StatusCode::kNotFound);
}

TEST(Chart, OneColumnPerValueAndTheTallestIsFull) {
  const std::vector<std::int64_t> load = {0, 4, 8};
  EXPECT_EQ(column_chart(load, 2, "x"), "x      ██ 8\n    ██ ██ \n 0  1  2  \n");
  // 100 values fold into columns of five.
  EXPECT_NE(column_chart(std::vector<std::int64_t>(100, 1), 1, "").find("95"), std::string::npos);
}

// Without a device: what explain lists for one is enough.
TEST(SlowBackend, IsSpokenOfWithTheReason) {
  FusedMoE::Options options;
  options.device = Device::cuda(0);
  const MoeLayerSpec spec = layer_from_shape("qwen3-30b").value();
  const auto note = [&](const char* quant) {
    options.quant = quant;
    const LayerExplanation e = explain_layer(spec, options).value();
    return slow_backend_note(e.experts_backend, e.candidates);
  };
  EXPECT_EQ(note("bf16"), "");
  const std::string slow = note("f32");
  for (const char* word : {"cuda_general", "slow", "cuda_sm90: ", "got f32", "--device cpu"}) {
    EXPECT_NE(slow.find(word), std::string::npos) << slow;
  }
  options.device = Device::cpu();
  EXPECT_EQ(note("f32"), "");
}

// FP8 blocks of other sizes than the fast kernel's: the general one computes, and verify, run, bench
// and explain say why.
TEST(SlowBackend, FP8BlocksOfOtherSizes) {
  FusedMoE::Options options;
  options.device = Device::cuda(0);
  MoeLayerSpec spec = layer_from_shape("qwen3-30b").value();
  const Scheme named = quant_scheme_from_name("fp8-block").value();
  OperandQuant w = named.weight, a = named.activation;
  w.block_n = w.block_k = a.block_k = 64;
  spec.quant = make_scheme(named.name, w, a, named.output_bound);
  const LayerExplanation stored = explain_layer(spec, options).value();
  const std::string why = slow_backend_note(stored.experts_backend, stored.candidates);
  EXPECT_NE(why.find("cuda_sm90: scheme: got fp8-any-block"), std::string::npos) << why;
  options.quant = "fp8-bf16";
  const LayerExplanation e = explain_layer(spec, options).value();
  const std::string note = slow_backend_note(e.experts_backend, e.candidates);
  EXPECT_NE(note.find("cuda_sm90: weight: got blocks of 64x64, need 128x128"), std::string::npos)
      << note;
}

TEST(LayerIo, SplitsAtTheLastColon) {
  EXPECT_EQ(split_tensor_path("a.st").second, "");
  EXPECT_EQ(split_tensor_path("a.st:x.y").second, "x.y");
  EXPECT_EQ(split_tensor_path("/no/such:thing/a.st:x").first, "/no/such:thing/a.st");
}

// A gate whose weight is the identity: hidden states are the logits.
struct Oracle {
  MoeLayerSpec spec;
  MoeLayerTensors tensors;

  Oracle(std::int64_t experts, std::int64_t top_k) {
    spec.hidden_size = experts;
    spec.num_experts = spec.routing.num_experts = experts;
    spec.routing.top_k = top_k;
    tensors.gate_weight = Tensor::zeros(DType::kF32, {experts, experts}).value();
    for (std::int64_t e = 0; e < experts; ++e) tensors.gate_weight.as<float>()[e * experts + e] = 1;
  }
  void set_bias(const std::vector<float>& bias) {
    spec.routing.has_correction_bias = true;
    tensors.e_score_correction_bias =
        Tensor::zeros(DType::kF32, {static_cast<std::int64_t>(bias.size())}).value();
    for (std::size_t e = 0; e < bias.size(); ++e) {
      tensors.e_score_correction_bias.as<float>()[e] = bias[e];
    }
  }
  bool possible(const std::vector<double>& logits, const std::vector<std::int32_t>& ids) const {
    Result<RoutingOracle> oracle = RoutingOracle::create(spec, tensors);
    EXPECT_TRUE(oracle.ok()) << oracle.status().to_string();
    oracle->set_token(logits);
    return oracle->possible(ids);
  }
};

TEST(Golden, OfGgufFilesLiesBesideThemAndNamesTheirBlocks) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("moesaic-golden-{}", ::getpid());
  fs::create_directories(folder);
  const std::string golden = (folder / "golden.safetensors").string();
  std::ofstream(folder / "model.gguf") << "GGUF";
  EXPECT_EQ(golden_beside(folder.string()), golden);
  EXPECT_EQ(golden_beside((folder / "model.gguf").string()), golden);
  const float one = 1.0F;
  const ConstTensorView row(reinterpret_cast<const std::byte*>(&one), DType::kF32, {1, 1});
  const NamedTensor tensors[] = {{"blk.3.input", row},
                                 {"blk.3.output", row},
                                 {"model.layers.12.mlp.input", row},
                                 {"model.layers.12.mlp.output", row},
                                 {"blk.x.input", row},
                                 {"blk.x.output", row}};
  ASSERT_TRUE(write_safetensors(golden, tensors).ok());
  const auto blocks = golden_blocks(TensorFile::open(golden).value()).value();
  ASSERT_EQ(blocks.size(), 2U);
  EXPECT_EQ(blocks[0].prefix, "blk.3");
  EXPECT_EQ(blocks[0].layer, 3);
  EXPECT_EQ(blocks[1].layer, 12);
  fs::remove_all(folder);
}

TEST(RoutingOracle, ClearChoices) {
  for (const ScoringFunc func :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    Oracle oracle(4, 2);
    oracle.spec.routing.scoring_func = func;
    const std::vector<double> logits = {0.5, -1, 2, 0.25};
    EXPECT_TRUE(oracle.possible(logits, {2, 0}));
    EXPECT_TRUE(oracle.possible(logits, {0, 2}));  // the order of slots is free
    EXPECT_FALSE(oracle.possible(logits, {2, 3}));
    EXPECT_FALSE(oracle.possible(logits, {2}));
    EXPECT_FALSE(oracle.possible(logits, {2, 2}));
    EXPECT_FALSE(oracle.possible(logits, {2, 4}));
    EXPECT_FALSE(oracle.possible(logits, {2, -1}));
  }
}

TEST(RoutingOracle, TheMarginIsThatOfRoundingAndNoWider) {
  Oracle oracle(4, 1);
  oracle.spec.routing.method = RoutingMethod::kTopKSoftmax;
  // Bound of a logit here: 4 * 2^-24 * |x|, on both sides.
  EXPECT_TRUE(oracle.possible({1, 1 + 1e-7, 0, 0}, {0}));
  EXPECT_TRUE(oracle.possible({1, 1 + 1e-7, 0, 0}, {1}));
  EXPECT_FALSE(oracle.possible({1, 1 + 1e-5, 0, 0}, {0}));
  EXPECT_TRUE(oracle.possible({1, 1 + 1e-5, 0, 0}, {1}));
}

TEST(RoutingOracle, OfScoresThatAreNoNumbersNothingIsPossible) {
  for (const double bad : {std::nan(""), double{INFINITY}}) {
    for (const std::int64_t groups : {1, 2}) {
      Oracle oracle(4, 1);
      oracle.spec.routing.scoring_func = ScoringFunc::kSigmoid;
      if (groups > 1) {
        oracle.spec.routing.method = RoutingMethod::kGroupedTopK;
        oracle.spec.routing.num_expert_group = groups;
        oracle.spec.routing.topk_group = 1;
      }
      for (std::int32_t id = 0; id < 4; ++id) {
        EXPECT_FALSE(oracle.possible({1, bad, 0, -1}, {id})) << bad << ' ' << groups << ' ' << id;
      }
    }
  }
}

TEST(RoutingOracle, LogitsThatAreRoundedMayTie) {
  Oracle oracle(4, 1);
  oracle.spec.routing.method = RoutingMethod::kTopKSoftmax;
  RoutingOracle rounded = RoutingOracle::create(oracle.spec, oracle.tensors).value();
  const std::vector<double> logits = {1, 1 + 0x1p-9, 0, 0};
  for (const double rounding : {0.0, 0x1p-9}) {
    rounded.set_token(logits, rounding);
    EXPECT_EQ(rounded.possible(std::vector<std::int32_t>{0}), rounding > 0);
    EXPECT_TRUE(rounded.possible(std::vector<std::int32_t>{1}));
    EXPECT_FALSE(rounded.possible(std::vector<std::int32_t>{2}));
  }
}

TEST(RoutingOracle, BiasTakesPartInTheSelection) {
  Oracle oracle(4, 1);
  oracle.spec.routing.scoring_func = ScoringFunc::kSigmoid;
  oracle.set_bias({0, 0, 0, 1});
  EXPECT_TRUE(oracle.possible({5, 0, 0, 0}, {3}));
  EXPECT_FALSE(oracle.possible({5, 0, 0, 0}, {0}));
}

TEST(RoutingOracle, GroupsLimitTheChoice) {
  Oracle oracle(6, 2);
  oracle.spec.routing.method = RoutingMethod::kGroupedTopK;
  oracle.spec.routing.num_expert_group = 3;
  oracle.spec.routing.topk_group = 1;
  const std::vector<double> logits = {3, 0, 2, 2.5, 1, 1};
  // Without a bias a group counts by its best member ...
  EXPECT_TRUE(oracle.possible(logits, {0, 1}));
  EXPECT_FALSE(oracle.possible(logits, {0, 3}));
  EXPECT_FALSE(oracle.possible(logits, {2, 3}));
  // ... with one by its two best.
  oracle.spec.routing.scoring_func = ScoringFunc::kSigmoid;
  oracle.set_bias({0, 0, 0, 0, 0, 0});
  EXPECT_TRUE(oracle.possible(logits, {2, 3}));
  EXPECT_FALSE(oracle.possible(logits, {0, 1}));
}

TEST(RoutingOracle, RefusesWhatIsNoFunctionOfScores) {
  Oracle oracle(4, 1);
  oracle.spec.routing.method = RoutingMethod::kHash;
  EXPECT_EQ(RoutingOracle::create(oracle.spec, oracle.tensors).status().code(),
            StatusCode::kUnsupported);
}

}  // namespace
}  // namespace moesaic::tool
