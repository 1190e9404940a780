// FusedMoE::from_checkpoint: what only a layer that reads its weights itself can decide.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/container_support.h"
#include "layer/golden_case.h"
#include "layer/layer_case.h"
#include "moesaic/log.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

using test::bundled_model;

// The model's files with every `from` in them replaced by `to`, of the same length.
void copy_renamed(const std::string& folder, const test::TempDir& to_folder,
                  const std::string& from, const std::string& to) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::string bytes = test::read_bytes(file.path().string());
    for (std::size_t at = bytes.find(from); at != std::string::npos; at = bytes.find(from, at)) {
      bytes.replace(at, from.size(), to);
    }
    test::write_bytes(to_folder.path(file.path().filename().string()), bytes);
  }
}

FusedMoE::Options on_one_thread() {
  FusedMoE::Options options;
  options.num_threads = 1;
  return options;
}

// The engine has the gate: its files need not hold one, and the layer computes the same from what
// that gate would say.
TEST(FromCheckpoint, WithoutTheGateItsTensorsNeedNotBeThere) {
  for (const char* name : {"mini-qwen3-moe", "mini-deepseek-v3"}) {
    const test::TempDir folder;
    copy_renamed(bundled_model(name), folder, ".1.mlp.gate.weight", ".1.xxx.gate.weight");
    const Checkpoint whole = Checkpoint::open(bundled_model(name)).value();
    const Checkpoint without = Checkpoint::open(folder.path()).value();
    FusedMoE::Options options = on_one_thread();
    expect_refusal(FusedMoE::from_checkpoint(without, 1, options).status(),
                   StatusCode::kMissingTensor, {"mlp.gate.weight"});
    const FusedMoE own = FusedMoE::from_checkpoint(whole, 1, options).value();
    options.include_gate = false;
    EXPECT_TRUE(without.check_layer(1, {}, /*include_gate=*/false).ok());
    auto layer = FusedMoE::from_checkpoint(without, 1, options);
    ASSERT_TRUE(layer.ok()) << layer.status().to_string();
    const Tensor x = test::random_hidden(81, 9, own.spec().hidden_size);
    const test::LayerRun want = test::run_layer(own, x);
    FusedMoE::Args args;
    args.hidden_states = x.view();
    args.router_logits = want.logits.view();
    std::string why;
    const test::LayerRun got = test::must_run(*layer, args);
    EXPECT_TRUE(test::same_bits(got.output.view(), want.output.view(), &why)) << name << why;
    // A file that has one is read without it too.
    auto unread = FusedMoE::from_checkpoint(whole, 1, options);
    ASSERT_TRUE(unread.ok()) << unread.status().to_string();
    EXPECT_LT(unread->weight_bytes(), own.weight_bytes());
  }
}

TEST(FromCheckpoint, RoundRobinBecomesLinearWithAWarningWhereItGainsNothing) {
  std::vector<std::string> warnings;
  set_log_sink([&](std::string_view text) { warnings.emplace_back(text); });
  FusedMoE::Options options = on_one_thread();
  options.parallel.ep_size = 2;
  options.parallel.placement = ExpertPlacement::kRoundRobin;
  const auto summary_of = [&](const char* name) {
    const Checkpoint checkpoint = Checkpoint::open(bundled_model(name)).value();
    const auto layer = FusedMoE::from_checkpoint(checkpoint, 1, options);
    return layer.ok() ? layer->summary() : layer.status().to_string();
  };
  // Groups of experts: every rank gets some of each.
  EXPECT_NE(summary_of("mini-deepseek-v3").find("experts 0, 2, 4 ... of 16"), std::string::npos)
      << summary_of("mini-deepseek-v3");
  EXPECT_TRUE(warnings.empty());
  const std::string plain = summary_of("mini-qwen3-moe");
  EXPECT_NE(plain.find("experts 0 to 7 of 16"), std::string::npos) << plain;
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("round_robin becomes linear: the router has no expert groups"),
            std::string::npos)
      << warnings[0];
  set_log_sink({});
  // The part that is computed is that of a linear rank.
  const Checkpoint checkpoint = Checkpoint::open(bundled_model("mini-qwen3-moe")).value();
  const FusedMoE robin = FusedMoE::from_checkpoint(checkpoint, 1, options).value();
  options.parallel.placement = ExpertPlacement::kLinear;
  const FusedMoE linear = FusedMoE::from_checkpoint(checkpoint, 1, options).value();
  const Tensor x = test::random_hidden(82, 9, linear.spec().hidden_size);
  std::string why;
  EXPECT_TRUE(test::same_bits(test::run_layer(robin, x).output.view(),
                              test::run_layer(linear, x).output.view(), &why))
      << why;
  // What is wrong with load balancing is said before anything is read.
  options.ranks.num_redundant_experts = 3;
  expect_refusal(FusedMoE::from_checkpoint(checkpoint, 1, options).status(),
                 StatusCode::kInvalidArgument, {"num_redundant_experts: got 3"});
}

}  // namespace
}  // namespace moesaic
