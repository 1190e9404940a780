// The layer on trained checkpoints against outputs computed in float64 from the stored weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>

#include "layer/golden_case.h"
#include "layer/layer_case.h"
#include "moesaic/fused_moe.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::bundled_model;
using test::compare;
using test::expect_same_choice;
using test::extra_model;
using test::first_rows;
using test::Golden;
using test::GoldenCase;
using test::read_golden;
using test::to_doubles;

FusedMoE::Options quant_options(const std::string& quant, const std::string& backend = {}) {
  FusedMoE::Options options;
  options.quant = quant;
  options.backend = backend;
  options.max_tokens = 100;  // 256 tokens: two full chunks and a part
  return options;
}

std::vector<GoldenCase> cases() {
  std::vector<GoldenCase> all;
  for (const char* model : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    all.push_back({model, "f32", 2e-6});
    all.push_back({model, "as-is", 6e-3});
    all.push_back({model, "f16", 1e-3});
    all.push_back({model, "fp8-bf16", 6.1e-2});   // weights quantised at load
    all.push_back({model, "fp8-block", 8.5e-2});  // and activations
  }
  for (const char* model : {"tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-gpt-oss"}) {
    all.push_back({model, "f32", 2e-6, true});
    all.push_back({model, "bf16", 6e-3, true});
  }
  all.push_back({"tiny-deepseek-v3-fp8", "f32", 2e-6, true});
  all.push_back({"tiny-deepseek-v3-fp8", "fp8-bf16", 6e-3, true});
  all.push_back({"tiny-deepseek-v3-fp8", "as-is", 6e-2, true});
  return all;
}

class GoldenLayer : public testing::TestWithParam<GoldenCase> {};
INSTANTIATE_TEST_SUITE_P(Models, GoldenLayer, testing::ValuesIn(cases()), [](const auto& param) {
  std::string name = param.param.model + "_" + param.param.quant;
  for (char& ch : name) ch = ch == '-' ? '_' : ch;
  return name;
});

TEST_P(GoldenLayer, MatchesFloat64) {
  const std::string folder = GetParam().folder();
  if (!std::filesystem::exists(folder + "/golden.safetensors")) {
    GTEST_SKIP() << "no " << folder << "; MOESAIC_EXTRA_MODELS names the folder of more models";
  }
  const Checkpoint checkpoint = Checkpoint::open(folder).value();
  for (const Golden& g : read_golden(checkpoint, folder)) {
    for (const char* backend : {"", "cpu_reference"}) {
      const auto layer =
          FusedMoE::from_checkpoint(checkpoint, g.layer, quant_options(GetParam().quant, backend));
      ASSERT_TRUE(layer.ok()) << layer.status().to_string();
      // The plain reference takes seconds for all rows of the bigger models; a row does not depend
      // on its batch, so some show it.
      const bool some = GetParam().is_extra && backend[0] != '\0';
      const std::int64_t rows = some ? 24 : g.input.shape()[0];
      const test::LayerRun run = test::run_layer(*layer, first_rows(g.input, rows));
      const auto result =
          compare(to_doubles(run.output.view()), to_doubles(first_rows(g.output, rows).view()));
      EXPECT_LE(result.rel_l2, GetParam().bound)
          << layer->experts_backend() << " layer " << g.layer << ": " << result.describe;
      EXPECT_LE(GetParam().bound, layer->quant().output_bound * 1.02);
      if (g.ids.present()) expect_same_choice(run.topk_ids, first_rows(g.ids, rows));
    }
  }
}

// Full FP8 block on the same quantised operands: activations as the scheme rounds them, sums in
// float64. What is left is fp32 accumulation and codes at a rounding boundary.
TEST(GoldenFp8Block, MatchesFloat64OnTheSameQuantisedOperands) {
  const std::string folder = extra_model("tiny-deepseek-v3-fp8");
  if (!std::filesystem::exists(folder)) {
    GTEST_SKIP() << "no " << folder << "; MOESAIC_EXTRA_MODELS names the folder of more models";
  }
  const Checkpoint checkpoint = Checkpoint::open(folder).value();
  for (const Golden& g : read_golden(checkpoint, folder)) {
    const auto layer =
        FusedMoE::from_checkpoint(checkpoint, g.layer, quant_options("fp8-block")).value();
    const Tensor input = first_rows(g.input, 64);  // the oracle is slow
    const test::LayerRun run = test::run_layer(layer, input);
    MoeLayerWeights w = checkpoint.load_layer(g.layer, ParallelConfig()).value();
    const auto experts = test::collect(*w.experts, w.spec.num_experts);
    MoeProblem p;
    p.num_experts = p.num_local_experts = w.spec.num_experts;
    p.top_k = w.spec.routing.top_k;
    p.hidden_size = w.spec.hidden_size;
    p.intermediate_size = w.spec.intermediate_size;
    p.activation = w.spec.activation;
    p.quant = w.spec.quant;
    auto want = test::oracle_moe(p, experts.view(), input.view(), run.topk_ids.view(),
                                 run.topk_weights.view(), {}, {true});
    p.num_experts = p.num_local_experts = p.top_k = 1;
    p.intermediate_size = w.spec.shared.intermediate_size;
    p.quant = w.shared_quant;
    const auto shared = test::collect(*w.shared, 1);
    const auto x = to_doubles(input.view());
    const auto hidden = static_cast<std::size_t>(p.hidden_size);
    for (std::size_t t = 0; t * hidden < x.size(); ++t) {
      const auto y =
          test::oracle_expert(p, shared.view(), 0, {x.data() + t * hidden, hidden}, 1, {true});
      for (std::size_t h = 0; h < hidden; ++h) want[t * hidden + h] += y[h];
    }
    const auto result = compare(to_doubles(run.output.view()), want);
    EXPECT_LE(result.rel_l2, 3e-3) << "layer " << g.layer << ": " << result.describe;
  }
}

// --- Partial results of ranks --------------------------------------------------------------------

struct Split {
  int tp, ep;
  ExpertPlacement placement = ExpertPlacement::kLinear;
};

TEST(ParallelLayer, PartialResultsOfAllRanksAddUpToOneRank) {
  for (const char* model : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    const Checkpoint checkpoint = Checkpoint::open(bundled_model(model)).value();
    const Golden g = std::move(read_golden(checkpoint, bundled_model(model)).front());
    const auto want = to_doubles(
        test::run_layer(
            FusedMoE::from_checkpoint(checkpoint, g.layer, quant_options("f32")).value(), g.input)
            .output.view());
    for (const Split& split : {Split{2, 1}, Split{4, 1}, Split{1, 2}, Split{1, 3}, Split{1, 20},
                               Split{1, 4, ExpertPlacement::kRoundRobin}}) {
      std::vector<double> sum(want.size());
      for (int rank = 0; rank < split.tp * split.ep; ++rank) {
        FusedMoE::Options options = quant_options("f32");
        options.parallel.tp_size = split.tp;
        options.parallel.tp_rank = split.tp > 1 ? rank : 0;
        options.parallel.ep_size = split.ep;
        options.parallel.ep_rank = split.ep > 1 ? rank : 0;
        options.parallel.placement = split.placement;
        const auto layer = FusedMoE::from_checkpoint(checkpoint, g.layer, options);
        ASSERT_TRUE(layer.ok()) << model << " tp " << split.tp << " ep " << split.ep << " rank "
                                << rank << ": " << layer.status().to_string();
        const auto part = to_doubles(test::run_layer(*layer, g.input).output.view());
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
      }
      const auto result = compare(sum, want);
      EXPECT_LE(result.rel_l2, 1e-6)
          << model << " tp " << split.tp << " ep " << split.ep << ": " << result.describe;
    }
  }
}

TEST(ParallelLayer, SharedExpertsCanBeLeftToTheCaller) {
  const Checkpoint checkpoint = Checkpoint::open(bundled_model("mini-deepseek-v3")).value();
  const Golden g = std::move(read_golden(checkpoint, bundled_model("mini-deepseek-v3")).front());
  FusedMoE::Options options = quant_options("f32");
  const auto with = to_doubles(
      test::run_layer(FusedMoE::from_checkpoint(checkpoint, g.layer, options).value(), g.input)
          .output.view());
  options.include_shared = false;
  const FusedMoE routed_only = FusedMoE::from_checkpoint(checkpoint, g.layer, options).value();
  const auto without = to_doubles(test::run_layer(routed_only, g.input).output.view());
  EXPECT_GE(compare(without, with).rel_l2, 0.05) << "the shared expert hardly counts";
  for (const CandidateReport& row : routed_only.explain()) EXPECT_NE(row.stage, "shared_experts");
}

TEST(ParallelLayer, AnFp8SliceThatCutsABlockIsRefused) {
  const std::string folder = extra_model("tiny-deepseek-v3-fp8");
  if (!std::filesystem::exists(folder)) {
    GTEST_SKIP() << "no " << folder << "; MOESAIC_EXTRA_MODELS names the folder of more models";
  }
  const Checkpoint checkpoint = Checkpoint::open(folder).value();
  FusedMoE::Options options = quant_options("as-is");
  options.parallel.tp_size = 2;
  const auto layer = FusedMoE::from_checkpoint(checkpoint, 1, options);
  ASSERT_FALSE(layer.ok());
  EXPECT_NE(layer.status().message().find("128"), std::string::npos) << layer.status().to_string();
}

}  // namespace
}  // namespace moesaic
