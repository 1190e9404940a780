// Load balancing of several layers as one call in each step.
#include "moesaic/interop/eplb_stepper.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "layer/eplb_case.h"
#include "moesaic/eplb.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::eplb_options;
using test::EplbFixture;
using test::expect_refusal;
using test::on_ranks;

constexpr std::size_t kLayers = 3;

EplbStepper::Options every_four_steps() {
  EplbStepper::Options o;
  o.schedule = {.window = 2, .interval = 4};
  o.max_transfers = 2;
  return o;
}

FusedMoE::Options on_one_rank() {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.ranks.enable_eplb = true;
  o.ranks.num_redundant_experts = 2;
  return o;
}

Result<std::vector<FusedMoE>> make_layers(const EplbFixture& f, const FusedMoE::Options& options) {
  std::vector<FusedMoE> layers;
  for (std::size_t i = 0; i < kLayers; ++i) {
    MOESAIC_ASSIGN_OR_RETURN(FusedMoE layer, FusedMoE::create(f.tensors.weights(), options));
    layers.push_back(std::move(layer));
  }
  return layers;
}
std::vector<FusedMoE*> pointers(std::vector<FusedMoE>& layers) {
  std::vector<FusedMoE*> all;
  for (FusedMoE& layer : layers) all.push_back(&layer);
  return all;
}

TEST(EplbStepper, MovesOneLayerAfterTheOtherWhileAllServe) {
  const EplbFixture f(test::eplb_spec());
  const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layers = make_layers(f, eplb_options(rank, 4, RankTransport::kAllToAll, c));
    if (!layers.ok()) return layers.status().to_string();
    auto stepper = EplbStepper::create(pointers(*layers), every_four_steps());
    if (!stepper.ok()) return stepper.status().to_string();
    const auto first_places = layers->front().physical_to_logical();
    std::vector<std::ptrdiff_t> order;
    int decisions = 0;
    for (int step = 1; step <= 40 && (order.size() < kLayers || decisions < 2); ++step) {
      for (std::size_t i = 0; i < kLayers; ++i) {
        // Layers see other rows, so that their loads differ.
        const std::string now = f.forward((*layers)[i], (rank + static_cast<int>(i)) % 4);
        if (!now.empty()) return fmt::format("step {} layer {}: {}", step, i, now);
      }
      const auto report = stepper->step();
      if (!report.ok()) return report.status().to_string();
      if (report->decided) {
        if (decisions++ == 0 && (step != 1 || report->left != kLayers)) {
          return fmt::format("first decision in step {}, of {} layers", step, report->left);
        }
        if (report->switched >= 0 && report->left == kLayers)
          return "a decision while layers moved";
        if (report->balancedness_after < report->balancedness_before) return "worse balanced";
      }
      if (report->switched < 0) continue;
      const auto i = static_cast<std::size_t>(report->switched);
      order.push_back(report->switched);
      if ((*layers)[i].physical_to_logical() == first_places) return "no other places";
      if (decisions == 1 && report->left != kLayers - order.size()) return "left";
    }
    if (decisions < 2) return "one decision only";
    order.resize(kLayers);
    return order == std::vector<std::ptrdiff_t>{0, 1, 2} ? "" : "another order of layers";
  });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(EplbStepper, RecordsAsTheScheduleSays) {
  const EplbFixture f(test::eplb_spec());
  auto layers = make_layers(f, on_one_rank()).value();
  EplbStepper::Options options;
  options.schedule = {.window = 2, .interval = 8};
  auto stepper = EplbStepper::create(pointers(layers), options).value();
  std::vector<bool> recorded;
  double before = 0;
  for (int step = 1; step <= 10; ++step) {
    recorded.push_back(stepper.recording());
    if (!recorded.back()) {
      // What is not recorded leaves the window as it was.
      const auto load = layers[0].measured_load().value();
      EXPECT_EQ(f.forward(layers[0], step % 4), "");
      EXPECT_EQ(layers[0].measured_load().value(), load);
    } else {
      EXPECT_EQ(f.forward(layers[0], step % 4), "");
    }
    ASSERT_TRUE(stepper.step().ok());
    const std::vector<double> load = layers[0].measured_load().value();
    const double sum = std::accumulate(load.begin(), load.end(), 0.0);
    EXPECT_GE(sum, before);
    before = sum;
  }
  // The first decision ends step 2, the next one step 10; two steps before each are recorded.
  EXPECT_EQ(recorded,
            (std::vector<bool>{true, true, false, false, false, false, false, false, true, true}));
  EXPECT_EQ(before, 4.0 * test::kEplbTokens * 5);
}

// The policy would copy the first expert into all redundant slots, which traffic would find there.
TEST(EplbStepper, LayersWithoutLoadKeepTheirPlaces) {
  const EplbFixture f(test::eplb_spec());
  auto layers = make_layers(f, on_one_rank()).value();
  const auto places = layers[0].physical_to_logical();
  EXPECT_EQ(f.forward(layers[1], 0), "");  // one has load
  auto stepper = EplbStepper::create(pointers(layers), every_four_steps()).value();
  const auto report = stepper.step().value();
  EXPECT_TRUE(report.decided);
  EXPECT_EQ(report.left, 1U);
  for (int step = 0; step < 4; ++step) ASSERT_TRUE(stepper.step().ok());
  EXPECT_EQ(layers[0].physical_to_logical(), places);
  EXPECT_NE(layers[1].physical_to_logical(), places);
  EXPECT_EQ(layers[2].physical_to_logical(), places);
}

TEST(EplbStepper, RefusesByName) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE plain = test::make_layer(f.tensors);
  expect_refusal(EplbStepper::create({}, {}).status(), StatusCode::kInvalidArgument,
                 {"layers: got none"});
  expect_refusal(EplbStepper::create({nullptr}, {}).status(), StatusCode::kInvalidArgument,
                 {"layers[0]: got null"});
  expect_refusal(EplbStepper::create({&plain}, {}).status(), StatusCode::kUnsupported,
                 {"layers[0]", "enable_eplb: got false"});
  EplbStepper::Options bad;
  bad.max_transfers = 0;
  expect_refusal(EplbStepper::create({&plain}, bad).status(), StatusCode::kInvalidArgument,
                 {"max_transfers: got 0"});
  bad = {};
  bad.num_nodes = 0;
  expect_refusal(EplbStepper::create({&plain}, bad).status(), StatusCode::kInvalidArgument,
                 {"num_nodes: got 0"});
  // Four nodes have whole groups, but no whole ranks: told now, not at the first decision.
  FusedMoE::Options lone;
  lone.num_threads = 1;
  lone.ranks.enable_eplb = true;
  auto balanced = make_layers(f, lone).value();
  bad = {};
  bad.num_nodes = 4;
  expect_refusal(EplbStepper::create(pointers(balanced), bad).status(),
                 StatusCode::kInvalidArgument,
                 {"layers[0]", "num_ranks: got 1, need a multiple of num_nodes = 4"});
  bad.num_nodes = 3;  // no whole groups: nodes are set aside
  EXPECT_TRUE(EplbStepper::create(pointers(balanced), bad).ok());
  bad = {};
  bad.schedule.interval = 0;
  expect_refusal(EplbStepper::create({&plain}, bad).status(), StatusCode::kInvalidArgument,
                 {"interval"});
  FusedMoE silent =
      FusedMoE::create(f.tensors.weights(), eplb_options(0, 4, RankTransport::kAuto, nullptr))
          .value();
  expect_refusal(EplbStepper::create({&silent}, {}).status(), StatusCode::kUnsupported,
                 {"layers[0]", "without a communicator"});
}

}  // namespace
}  // namespace moesaic
