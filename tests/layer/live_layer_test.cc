// A layer whose world changes while it lives, and what it says of its experts.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "layer/eplb_case.h"
#include "layer/rank_case.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::on_ranks;

ParallelConfig experts_of(int size, int rank) {
  ParallelConfig p;
  p.ep_size = p.dp_size = size;
  p.ep_rank = p.dp_rank = rank;
  return p;
}
ParallelConfig slices_of(int size, int rank) {
  ParallelConfig p;
  p.tp_size = size;
  p.tp_rank = rank;
  return p;
}

MoeLayerSpec plain() {
  MoeLayerSpec spec = test::small_spec();
  spec.num_experts = spec.routing.num_experts = 10;
  spec.routing.top_k = 4;
  return spec;
}

// Without a communicator.
FusedMoE::World world_of(const ParallelConfig& parallel, std::int64_t redundant = 0) {
  FusedMoE::World world;
  world.parallel = parallel;
  world.num_redundant_experts = redundant;
  return world;
}

FusedMoE::Options alone_in(const ParallelConfig& parallel) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 7;
  o.parallel = parallel;
  return o;
}

// What two layers make of the same rows; empty where it is the same.
std::string differ(const FusedMoE& a, const FusedMoE& b, const Tensor& x) {
  std::string why;
  return test::same_bits(test::run_layer(a, x).output.view(), test::run_layer(b, x).output.view(),
                         &why)
             ? ""
             : why;
}

TEST(LiveLayer, AnUpdatedLayerIsTheOneOfItsNewWorld) {
  const test::LayerTensors tensors = test::make_tensors(71, plain());
  const Tensor x = test::random_hidden(72, 12, tensors.spec.hidden_size);
  for (const char* quant : {"as-is", "f32"}) {
    FusedMoE::Options start = alone_in(experts_of(2, 1));
    start.quant = quant;
    FusedMoE layer = FusedMoE::create(test::rank_weights(tensors, start.parallel), start).value();
    ParallelConfig strided = experts_of(3, 2);
    strided.placement = ExpertPlacement::kRoundRobin;
    for (const ParallelConfig& p :
         {experts_of(4, 2), experts_of(1, 0), slices_of(2, 1), strided, experts_of(2, 1)}) {
      const MoeLayerWeights weights = test::rank_weights(tensors, p);
      const Status updated = layer.update_expert_map(world_of(p), *weights.experts);
      ASSERT_TRUE(updated.ok()) << updated.to_string();
      FusedMoE::Options there = alone_in(p);
      there.quant = quant;
      const FusedMoE fresh = FusedMoE::create(test::rank_weights(tensors, p), there).value();
      EXPECT_EQ(differ(layer, fresh, x), "") << p.ep_size << ' ' << p.tp_size << ' ' << quant;
      EXPECT_EQ(layer.expert_map(), make_expert_map(10, p).value());
      EXPECT_EQ(layer.expert_map(), fresh.expert_map());
      EXPECT_EQ(layer.global_num_experts(), 10);
      EXPECT_EQ(layer.local_num_experts(), std::ssize(local_expert_ids(10, p).value()));
      EXPECT_EQ(layer.parallel().ep_size, p.ep_size);
      EXPECT_EQ(layer.parallel().ep_rank, p.ep_rank);
      EXPECT_EQ(layer.parallel().tp_size, p.tp_size);
      EXPECT_EQ(layer.weight_bytes(), fresh.weight_bytes());
      EXPECT_EQ(layer.workspace_bytes(), fresh.workspace_bytes());
      EXPECT_EQ(layer.output_is_reduced(), p.flat_size() == 1);
    }
  }
}

TEST(LiveLayer, MoreRanksThanExpertsLeaveSomeWithNone) {
  MoeLayerSpec spec = plain();
  spec.num_experts = spec.routing.num_experts = 4;
  const test::LayerTensors tensors = test::make_tensors(73, spec);
  const Tensor x = test::random_hidden(74, 5, spec.hidden_size);
  FusedMoE layer = test::make_layer(tensors, alone_in({}));
  const ParallelConfig p = experts_of(6, 5);
  const MoeLayerWeights weights = test::rank_weights(tensors, p);
  ASSERT_TRUE(layer.update_expert_map(world_of(p), *weights.experts).ok());
  EXPECT_EQ(layer.local_num_experts(), 0);
  EXPECT_EQ(layer.expert_map(), std::vector<std::int32_t>(4, -1));
  EXPECT_TRUE(layer.get_expert_weights().value().empty());
  const FusedMoE fresh = FusedMoE::create(test::rank_weights(tensors, p), alone_in(p)).value();
  EXPECT_EQ(differ(layer, fresh, x), "");
}

// Four ranks, of which two leave; then one comes.
struct Worlds {
  explicit Worlds(bool eplb) : eplb_(eplb) {
    for (const int size : {4, 2, 3}) {
      auto made = make_in_process_communicators(size, {.timeout_ms = test::kHangGuardMs}).value();
      auto& of_size = ranks_.emplace_back();
      for (auto& c : made) of_size.push_back(std::shared_ptr<Communicator>(std::move(c)));
    }
  }
  FusedMoE::World of(int phase, int rank) const {
    const auto& ranks = ranks_[static_cast<std::size_t>(phase)];
    const auto size = static_cast<int>(ranks.size());
    FusedMoE::World world;
    world.parallel = experts_of(size, rank);
    world.communicator = ranks[static_cast<std::size_t>(rank)];
    world.num_redundant_experts = eplb_ ? 4 - phase % 2 * 2 - phase / 2 : 0;  // 16, 14, 15 slots
    return world;
  }
  FusedMoE::Options options(int phase, int rank) const {
    const FusedMoE::World world = of(phase, rank);
    FusedMoE::Options o = alone_in(world.parallel);
    o.ranks.communicator = world.communicator;
    o.ranks.enable_eplb = eplb_;
    o.ranks.num_redundant_experts = world.num_redundant_experts;
    if (!eplb_) o.ranks.reduction = RankReduction::kPerSlot;
    return o;
  }
  MoeLayerWeights weights(const test::LayerTensors& t, int phase, int rank) const {
    return eplb_ ? t.weights() : test::rank_weights(t, of(phase, rank).parallel);
  }

 private:
  bool eplb_;
  std::vector<std::vector<std::shared_ptr<Communicator>>> ranks_;
};

TEST(LiveLayer, RanksLeaveAndComeAndNoBitChanges) {
  const test::EplbFixture f(test::eplb_spec());
  for (const bool eplb : {false, true}) {
    const Worlds worlds(eplb);
    const auto wrong = on_ranks([&](int rank, const std::shared_ptr<Communicator>&) -> std::string {
      auto layer = FusedMoE::create(worlds.weights(f.tensors, 0, rank), worlds.options(0, rank));
      if (!layer.ok()) return layer.status().to_string();
      std::string first = f.forward(*layer, rank);
      if (eplb && first.empty()) {
        const Status begun = layer->begin_rearrange(test::random_map(5, 12, 16));
        if (!begun.ok()) return begun.to_string();
        for (bool done = false; !done;) done = layer->continue_rearrange(3).value();
        first = f.forward(*layer, rank);
      }
      if (rank == 3 || !first.empty()) return first;
      for (int phase = 1; phase <= 2; ++phase) {
        if (phase == 1 && rank == 2) continue;  // leaves, and comes back as a new layer
        const MoeLayerWeights w = worlds.weights(f.tensors, phase, rank);
        if (rank == 2) {
          layer =
              FusedMoE::create(worlds.weights(f.tensors, phase, rank), worlds.options(phase, rank));
          if (!layer.ok()) return layer.status().to_string();
        } else {
          const Status updated = layer->update_expert_map(worlds.of(phase, rank), *w.experts);
          if (!updated.ok()) return updated.to_string();
        }
        if (layer->parallel().ep_size != (phase == 1 ? 2 : 3)) return "not the new world";
        if (layer->global_num_experts() != (eplb ? 13 + (phase == 1 ? 1 : 2) : 12)) return "slots";
        const std::string now = f.forward(*layer, rank);
        if (!now.empty()) return "phase " + std::to_string(phase) + ": " + now;
        if (!eplb) continue;
        const Status begun = layer->begin_rebalance();
        if (!begun.ok()) return begun.to_string();
        for (bool done = false; !done;) done = layer->continue_rearrange(3).value();
        const std::string then = f.forward(*layer, rank);
        if (!then.empty()) return "rebalanced in phase " + std::to_string(phase) + ": " + then;
      }
      return "";
    });
    for (const std::string& w : wrong) EXPECT_EQ(w, "") << (eplb ? "eplb" : "plain");
  }
}

TEST(LiveLayer, SumsOfRanksAreThoseOfANewLayer) {
  const test::EplbFixture f(test::eplb_spec());
  const Worlds worlds(false);
  const auto wrong = on_ranks(
      [&](int rank, const std::shared_ptr<Communicator>&) -> std::string {
        FusedMoE::Options o = worlds.options(2, rank);  // three ranks, then two of them
        o.ranks.reduction = RankReduction::kPerRank;
        auto layer = FusedMoE::create(worlds.weights(f.tensors, 2, rank), o);
        if (!layer.ok()) return layer.status().to_string();
        if (rank == 2) return "";
        const MoeLayerWeights w = worlds.weights(f.tensors, 1, rank);
        const Status updated = layer->update_expert_map(worlds.of(1, rank), *w.experts);
        if (!updated.ok()) return updated.to_string();
        FusedMoE::Options there = worlds.options(1, rank);
        there.ranks.reduction = RankReduction::kPerRank;
        const auto fresh = FusedMoE::create(worlds.weights(f.tensors, 1, rank), there);
        if (!fresh.ok()) return fresh.status().to_string();
        return differ(*layer, *fresh, f.x);
      },
      3);
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

class FailsAt final : public ExpertSource {
 public:
  FailsAt(ExpertSource& source, std::int64_t at) : source_(source), at_(at) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    if (e == at_) return Status(StatusCode::kMissingTensor, "no such expert");
    return source_.expert(e);
  }

 private:
  ExpertSource& source_;
  std::int64_t at_;
};

TEST(LiveLayer, AFailureOnOneRankLeavesAllAsTheyWere) {
  const test::EplbFixture f(test::eplb_spec());
  for (const bool eplb : {false, true}) {
    const Worlds worlds(eplb);
    const auto wrong = on_ranks([&](int rank, const std::shared_ptr<Communicator>&) -> std::string {
      auto layer = FusedMoE::create(worlds.weights(f.tensors, 0, rank), worlds.options(0, rank));
      if (!layer.ok()) return layer.status().to_string();
      const std::vector<std::int32_t> map = layer->expert_map();
      if (rank < 2) {
        const MoeLayerWeights w = worlds.weights(f.tensors, 1, rank);
        FailsAt broken(*w.experts, rank != 1 ? -1 : eplb ? 8 : 2);
        const Status refused = layer->update_expert_map(worlds.of(1, rank), broken);
        expect_refusal(refused,
                       rank == 1 ? StatusCode::kMissingTensor : StatusCode::kInvalidArgument,
                       {rank == 1 ? "no such expert" : "rank 1 refused"});
      }
      if (layer->expert_map() != map || layer->parallel().ep_size != 4) return "changed";
      return f.forward(*layer, rank);
    });
    for (const std::string& w : wrong) EXPECT_EQ(w, "");
  }
}

TEST(LiveLayer, RefusesByName) {
  MoeLayerSpec spec = plain();
  spec.shared.intermediate_size = 16;
  const test::LayerTensors tensors = test::make_tensors(75, spec);
  const Tensor x = test::random_hidden(76, 5, spec.hidden_size);
  const FusedMoE::Options second = alone_in(experts_of(2, 1));
  FusedMoE layer = FusedMoE::create(test::rank_weights(tensors, second.parallel), second).value();
  const test::LayerRun before = test::run_layer(layer, x);
  const auto all = make_stacked_source(tensors.experts.view());
  // Rank 0 adds the shared experts, which this rank has never seen.
  expect_refusal(layer.update_expert_map(world_of(experts_of(1, 0)), *all),
                 StatusCode::kUnsupported, {"update_expert_map", "shared experts"});
  expect_refusal(layer.update_expert_map(world_of(experts_of(2, 2)), *all),
                 StatusCode::kInvalidArgument, {"ep_rank"});
  expect_refusal(layer.update_expert_map(world_of(experts_of(2, 1), 2), *all),
                 StatusCode::kInvalidArgument,
                 {"num_redundant_experts: got 2 without enable_eplb"});
  EXPECT_EQ(layer.parallel().ep_rank, 1);
  std::string why;
  EXPECT_TRUE(test::same_bits(test::run_layer(layer, x).output.view(), before.output.view(), &why))
      << why;

  // Not while experts move, and not into slots that the ranks cannot share.
  FusedMoE::Options moving = alone_in({});
  moving.ranks.enable_eplb = true;
  moving.ranks.num_redundant_experts = 2;
  FusedMoE balanced = test::make_layer(tensors, moving);
  expect_refusal(balanced.update_expert_map(world_of(experts_of(4, 0)), *all),
                 StatusCode::kInvalidArgument,
                 {"num_redundant_experts", "multiple of the 4 ranks"});
  ASSERT_TRUE(balanced.begin_rearrange(test::random_map(1, 10, 12)).ok());
  expect_refusal(balanced.update_expert_map({}, *all), StatusCode::kInvalidArgument,
                 {"update_expert_map", "in flight"});
  while (!balanced.continue_rearrange().value()) {
  }
  EXPECT_TRUE(balanced.update_expert_map({}, *all).ok());
  EXPECT_EQ(balanced.global_num_experts(), 10);
}

}  // namespace
}  // namespace moesaic
