// Every allocation that one rank of a layer makes fails in turn: the call ends with a reason on all
// ranks, and nobody waits for the time-out.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "layer/rank_case.h"
#include "moesaic/device.h"
#include "support/count_allocations.h"

namespace moesaic {
namespace {

// Long enough for a slow machine; a rank that waits so long was not told.
constexpr int kPatienceMs = 5000;

struct Scene {
  const char* name;
  int tp = 1, dp = 1;
  RankTransport transport = RankTransport::kAuto;
  void (*change)(FusedMoE::Options&) = [](FusedMoE::Options&) {};
};

// What fails: the making of a layer (null), or something done with it.
using Action = std::function<Status(FusedMoE&, const std::function<Status()>& forward)>;

class Rank {
 public:
  Rank(const test::LayerTensors& tensors, const Scene& scene,
       std::shared_ptr<Communicator> communicator)
      : tensors_(tensors), comm_(std::move(communicator)) {
    ParallelSizes sizes;
    sizes.tp_size = scene.tp;
    sizes.tp_rank = comm_->rank() % scene.tp;
    sizes.dp_size = scene.dp;
    sizes.dp_rank = comm_->rank() / scene.tp;
    sizes.enable_expert_parallel = true;
    options_.parallel = ParallelConfig::from_sizes(sizes).value();
    options_.num_threads = 1;
    options_.max_tokens = 4;
    options_.ranks.communicator = comm_;
    options_.ranks.transport = scene.transport;
    scene.change(options_);
    x_ = test::random_hidden(7, 6, tensors.spec.hidden_size);
    y_ = Tensor::zeros(DType::kF32, x_.shape()).value();
  }

  // Empty, or how it went wrong. The allocation `at` of the last rank fails; `hit`: there is one.
  std::string run(const Action& action, long at, std::barrier<>& all, bool& hit) {
    const bool mine = comm_->rank() == comm_->size() - 1;
    std::optional<FusedMoE> layer;
    const auto make = [&](MoeLayerWeights weights) {
      Result<FusedMoE> made = FusedMoE::create(std::move(weights), options_);
      if (made.ok()) layer.emplace(std::move(made).value());
      return made.status();
    };
    const auto forward = [&] { return layer->forward(x_.view(), y_.view()); };
    MoeLayerWeights weights = this->weights();
    Status status;
    if (action) status = make(std::move(weights));
    if (action && status.ok()) status = forward();
    all.arrive_and_wait();  // a failure would end what others are still about
    if (!status.ok()) {
      all.arrive_and_drop();
      return "before: " + status.to_string();
    }
    if (mine) test::fail_allocation(at);
    std::string wrong;
    try {
      status = action ? action(*layer, forward) : make(std::move(weights));
    } catch (const std::exception& error) {
      test::fail_allocation(-1);
      wrong = fmt::format("threw {}", error.what());
    }
    hit = test::allocation_failed();
    test::fail_allocation(-1);
    if (wrong.empty() && untold(status)) wrong = status.to_string();
    all.arrive_and_wait();
    // What comes next works, or says at once why it does not.
    if (wrong.empty() && action) {
      const Status next = forward();
      if (untold(next) || (!next.ok() && comm_->state().ok())) wrong = "next: " + next.to_string();
    }
    return wrong;
  }

  MoeLayerWeights weights() const {
    return options_.ranks.enable_eplb ? tensors_.weights()
                                      : test::rank_weights(tensors_, options_.parallel);
  }
  const FusedMoE::Options& options() const { return options_; }

 private:
  // Nobody told this rank why, or another reason than the first.
  static bool untold(const Status& status) {
    return status.message().find("nothing within") != std::string::npos ||
           status.message().find("given up") != std::string::npos;
  }

  const test::LayerTensors& tensors_;
  std::shared_ptr<Communicator> comm_;
  FusedMoE::Options options_;
  Tensor x_, y_;
};

using ActionOf = std::function<Action(const Rank&)>;

// Until an action is over before the allocation that is to fail. Returns how many there are.
long fail_each(const Scene& scene, const char* what, const ActionOf& action) {
  MoeLayerSpec spec = test::small_spec();
  spec.shared.intermediate_size = 16;
  const test::LayerTensors tensors = test::make_tensors(61, spec);
  for (long at = 0;; ++at) {
    const int ranks = scene.tp * scene.dp;
    auto world = make_in_process_communicators(ranks, {.timeout_ms = kPatienceMs}).value();
    std::vector<std::string> wrong(world.size());
    bool hit = false;
    std::barrier<> all(ranks);
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < world.size(); ++r) {
      threads.emplace_back([&, r] {
        Rank rank(tensors, scene, std::shared_ptr<Communicator>(std::move(world[r])));
        bool here = false;
        wrong[r] = rank.run(action ? action(rank) : Action(), at, all, here);
        if (r + 1 == wrong.size()) hit = here;
      });
    }
    for (std::thread& t : threads) t.join();
    for (std::size_t r = 0; r < wrong.size(); ++r) {
      EXPECT_EQ(wrong[r], "") << scene.name << ", " << what << ", allocation " << at << ", rank "
                              << r;
    }
    if (!hit || testing::Test::HasFailure()) return at;
  }
}

void with_eplb(FusedMoE::Options& o) {
  o.ranks.enable_eplb = true;
  o.ranks.num_redundant_experts = 2;
}
Action calls(const Rank&) {
  return [](FusedMoE&, const std::function<Status()>& forward) { return forward(); };
}

const Scene kParts = {"same rows", 2, 1, RankTransport::kNone};
const Scene kBalanced = {"load balancing", 1, 2, RankTransport::kAllToAll, with_eplb};

TEST(RankMemory, OfALayerThatIsMade) {
  EXPECT_GT(fail_each(kParts, "create", {}), 50);
  EXPECT_GT(fail_each(kBalanced, "create", {}), 50);
}

TEST(RankMemory, OfACall) {
  for (const Scene& scene :
       {kParts, kBalanced, Scene{"two engines, rows gathered", 2, 2, RankTransport::kGather},
        Scene{"rows to owners", 2, 1, RankTransport::kAllToAll},
        Scene{"slabs", 1, 2, RankTransport::kBatched},
        Scene{"two batches", 1, 2, RankTransport::kAllToAll,
              [](FusedMoE::Options& o) { o.ranks.dual_batch_tokens = 1; }},
        Scene{"slots", 2, 1, RankTransport::kNone,
              [](FusedMoE::Options& o) { o.ranks.reduction = RankReduction::kPerSlot; }}}) {
    EXPECT_GT(fail_each(scene, "forward", calls), 20);
  }
}

TEST(RankMemory, OfACallOnAGpu) {
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason;
  const auto on_gpu = [](FusedMoE::Options& o) { o.device = Device::cuda(0); };
  for (const Scene& scene :
       {Scene{"same rows", 2, 1, RankTransport::kNone, on_gpu},
        Scene{"rows gathered", 1, 2, RankTransport::kGather, on_gpu},
        Scene{"rows to owners", 2, 1, RankTransport::kAllToAll, on_gpu},
        Scene{"slabs", 1, 2, RankTransport::kBatched, on_gpu},
        Scene{"load balancing", 1, 2, RankTransport::kAllToAll, [](FusedMoE::Options& o) {
                with_eplb(o);
                o.device = Device::cuda(0);
              }}}) {
    EXPECT_GT(fail_each(scene, "forward", calls), 20);
  }
}

TEST(RankMemory, OfASumOfParts) {
  const Scene scene = {"parts", 2, 1, RankTransport::kNone,
                       [](FusedMoE::Options& o) { o.ranks.reduce_results = false; }};
  EXPECT_GT(
      fail_each(
          scene, "maybe_all_reduce",
          [](const Rank&) -> Action {
            const auto x = std::make_shared<Tensor>(Tensor::zeros(DType::kBF16, {6, 64}).value());
            return [x](FusedMoE& layer, const std::function<Status()>&) {
              return layer.maybe_all_reduce(x->view());
            };
          }),
      5);
}

TEST(RankMemory, OfAnotherWorld) {
  for (const Scene& scene : {kParts, kBalanced}) {
    EXPECT_GT(fail_each(scene, "update_expert_map",
                        [](const Rank& rank) -> Action {
                          const auto weights = std::make_shared<MoeLayerWeights>(rank.weights());
                          const FusedMoE::Options& o = rank.options();
                          const FusedMoE::World world = {o.parallel, o.ranks.communicator,
                                                         o.ranks.num_redundant_experts};
                          return [weights, world](FusedMoE& layer, const std::function<Status()>&) {
                            return layer.update_expert_map(world, *weights->experts);
                          };
                        }),
              20);
  }
}

TEST(RankMemory, OfLoadBalancing) {
  using Forward = const std::function<Status()>&;
  struct Case {
    const char* name;
    Action action;
  };
  // Made before anything fails.
  const std::vector<std::int32_t> wanted = {1, 0, 7, 6, 5, 4, 3, 2, 1, 0};
  const std::vector<std::int32_t> first = {0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<std::int32_t> counts(8, 1);
  EplbState state;
  state.logical_to_physical = first;
  state.replica_count = counts;
  state.max_replicas = 1;
  for (const auto& [name, action] :
       {Case{"measured_load",
             [](FusedMoE&layer, Forward) { return layer.measured_load().status(); }},
        Case{"begin_rebalance", [](FusedMoE&layer, Forward) { return layer.begin_rebalance(); }},
        Case{"rearrange",
             [&](FusedMoE&layer, Forward) -> Status {
               MOESAIC_RETURN_IF_ERROR(layer.begin_rearrange(wanted));
               for (bool done = false; !done;) {
                 MOESAIC_ASSIGN_OR_RETURN(done, layer.continue_rearrange(2));
               }
               return {};
             }},
        Case{"set_eplb_state",
             [&](FusedMoE&layer, Forward) { return layer.set_eplb_state(state); }}}) {
    EXPECT_GT(fail_each(kBalanced, name, [&, action = action](const Rank&) { return action; }), 5);
  }
}

}  // namespace
}  // namespace moesaic
