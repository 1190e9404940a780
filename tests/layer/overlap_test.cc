// Work while rows travel: shared experts beside the combine, two batches of a call at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "layer/rank_case.h"
#include "layer/rank_plan.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::RankCombo;
using test::RankProblem;

// Another communicator, whose exchanges are written down: "dispatch" when one is started,
// "dispatch." when it is completed.
class WatchedCommunicator final : public Communicator {
 public:
  WatchedCommunicator(std::shared_ptr<Communicator> real, std::vector<std::string>& log)
      : real_(std::move(real)), log_(log) {}
  std::string_view name() const override { return real_->name(); }
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  Status state() const override { return real_->state(); }
  std::int64_t bytes_sent() const override { return real_->bytes_sent(); }
  bool overlaps() const override { return real_->overlaps(); }
  Status exchange(std::string_view what, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> recv,
                  std::span<std::int64_t> received) override {
    return real_->exchange(what, send, recv, received);
  }
  Result<std::unique_ptr<PendingExchange>> start_exchange(
      std::string_view what, std::span<const std::span<const std::byte>> send,
      std::span<const std::span<std::byte>> recv, std::span<std::int64_t> received) override {
    const std::string name(what.substr(0, what.find(' ')));
    log_.push_back(name);
    MOESAIC_ASSIGN_OR_RETURN(auto pending, real_->start_exchange(what, send, recv, received));
    return std::unique_ptr<PendingExchange>(new Watched(std::move(pending), log_, name + "."));
  }
  Status abandon(std::string_view reason) override { return real_->abandon(reason); }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks, int id) override {
    return real_->subgroup(ranks, id);
  }

 private:
  class Watched final : public PendingExchange {
   public:
    Watched(std::unique_ptr<PendingExchange> real, std::vector<std::string>& log, std::string name)
        : real_(std::move(real)), log_(log), name_(std::move(name)) {}
    Status complete() override {
      log_.push_back(name_);
      return real_->complete();
    }

   private:
    std::unique_ptr<PendingExchange> real_;
    std::vector<std::string>& log_;
    std::string name_;
  };
  std::shared_ptr<Communicator> real_;
  std::vector<std::string>& log_;
};

FusedMoE::Options overlap_options(int rank, const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 8;
  o.parallel.ep_size = o.parallel.dp_size = 2;
  o.parallel.ep_rank = o.parallel.dp_rank = rank;
  o.ranks.communicator = communicator;
  return o;
}

TEST(Overlap, SharedExpertsRunWhileResultsTravel) {
  const test::LayerTensors tensors = test::make_tensors(91, test::small_spec());
  const auto make = test::maker_of(tensors);
  for (const auto transport :
       {RankTransport::kAllToAll, RankTransport::kGather, RankTransport::kBatched}) {
    std::vector<std::string> logs[2];
    const auto statuses = test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>& c) {
      std::vector<std::string>& log = logs[rank];
      FusedMoE::Options o = overlap_options(rank, std::make_shared<WatchedCommunicator>(c, log));
      o.ranks.transport = transport;
      o.shared_experts = [&log](ConstTensorView, const TensorView& out) {
        std::fill_n(out.as<float>(), out.dim(0) * out.dim(1), 0.0F);
        log.emplace_back("shared");
        return Status();
      };
      const auto layer = make(o);
      if (!layer.ok()) return layer.status();
      const Tensor x = test::random_hidden(92, 3, 64);
      Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
      return layer->forward(x.view(), y.view());
    });
    const std::vector<std::string> want = {"dispatch", "dispatch.", "combine", "shared",
                                           "combine."};
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_TRUE(statuses[r].ok()) << statuses[r].to_string();
      EXPECT_EQ(logs[r], want) << rank_transport_name(transport);
    }
  }
}

// The bits of one batch after the other, on every transport, and the rows of both batches leave
// before results of the first come back.
TEST(Overlap, TwoBatchesUnderWayHaveTheBitsOfOne) {
  const test::LayerTensors tensors =
      test::make_tensors(93, test::rank_specs().front().spec());  // DeepSeek-like
  const auto make = test::maker_of(tensors);
  for (const auto transport :
       {RankTransport::kAllToAll, RankTransport::kGather, RankTransport::kBatched}) {
    for (const std::int64_t tokens : {2, 8, 21}) {
      std::vector<std::string> logs[2];
      const auto statuses =
          test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>& c) {
            FusedMoE::Options o =
                overlap_options(rank, std::make_shared<WatchedCommunicator>(c, logs[rank]));
            o.ranks.transport = transport;
            const auto plain = make(o);
            o.ranks.dual_batch_tokens = 2;
            const auto dual = make(o);
            if (!plain.ok() || !dual.ok()) return plain.ok() ? dual.status() : plain.status();
            const std::int64_t mine = rank == 0 ? tokens : tokens / 3;  // the most rows decide
            const Tensor x = test::random_hidden(94, mine, tensors.spec.hidden_size);
            Tensor want = Tensor::zeros(DType::kF32, x.shape()).value();
            Tensor got = Tensor::uninitialized(DType::kF32, x.shape()).value();
            test::poison(got.view());
            MOESAIC_RETURN_IF_ERROR(plain->forward(x.view(), want.view()));
            logs[rank].clear();
            MOESAIC_RETURN_IF_ERROR(dual->forward(x.view(), got.view()));
            std::string why;
            return test::same_bits(got.view(), want.view(), &why)
                       ? Status()
                       : Status(StatusCode::kInternal, why);
          });
      const std::vector<std::string> pair = {"dispatch",  "dispatch", "dispatch.", "combine",
                                             "dispatch.", "combine",  "combine.",  "combine."};
      for (std::size_t r = 0; r < 2; ++r) {
        EXPECT_TRUE(statuses[r].ok()) << statuses[r].to_string();
        ASSERT_GE(logs[r].size(), pair.size());
        logs[r].resize(pair.size());  // of the first two batches
        EXPECT_EQ(logs[r], pair) << rank_transport_name(transport) << " " << tokens;
      }
    }
  }
}

// Tensor parallelism beside it, several steps, ranks without rows, given routing, identity experts.
TEST(Overlap, EveryCombinationOfFourRanksTakesTwoBatches) {
  const std::vector<test::Feature> features = test::rank_specs();
  for (const test::Feature& f : {features.front(), features.back()}) {
    const test::LayerTensors tensors = test::make_tensors(95, f.spec());
    RankProblem problem;
    problem.make = test::maker_of(tensors);
    problem.options.max_tokens = 6;
    problem.options.num_threads = 1;
    problem.x = test::random_hidden(96, 19, tensors.spec.hidden_size);
    test::solve_on_one_rank(problem);
    for (RankCombo combo : test::rank_combos(4)) {
      combo.dual = combo.moves_rows();
      if (!combo.dual) continue;
      const auto tokens = test::uneven_tokens(7, 19, combo.dp * combo.pcp);
      EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << f.name << " " << combo.name();
    }
  }
}

TEST(Overlap, RefusesByName) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = overlap_options(0, pair);
  o.max_tokens = 7;
  o.ranks.dual_batch_tokens = 16;
  EXPECT_EQ(layer::plan_ranks(o, 2)->in_flight, 2);
  EXPECT_EQ(layer::plan_ranks(o, 2)->batch_rows, 4);
  o.device = Device::cuda(0);
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kUnsupported,
                 {"dual_batch_tokens", "cuda"});
  o.device = Device::cpu();
  o.parallel.dp_size = 1;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kUnsupported,
                 {"dual_batch_tokens: got 16", "transport none"});
  o.ranks.dual_batch_tokens = -1;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kInvalidArgument,
                 {"dual_batch_tokens: got -1"});
}

// --- The rule, as explain shows it ---------------------------------------------------------------

std::string order_of(const MoeLayerSpec& spec, const FusedMoE::Options& options) {
  const auto explained = explain_layer(spec, options);
  return explained.ok() ? explained->stage_order : explained.status().to_string();
}

TEST(Overlap, ExplainTellsTheOrder) {
  const MoeLayerSpec plain = test::small_spec(), shared = test::with_shared(true);
  EXPECT_EQ(order_of(plain, {}), "gate, router, experts");
  EXPECT_EQ(order_of(shared, {}), "gate, router, experts, shared_experts");
  FusedMoE::Options o;
  o.include_gate = false;
  EXPECT_EQ(order_of(plain, o), "router, experts");
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  o = overlap_options(0, pair);
  EXPECT_EQ(order_of(plain, o), "gate, router, dispatch, experts, combine");
  EXPECT_EQ(order_of(shared, o),
            "gate, router, dispatch, experts, combine (shared_experts meanwhile)");
  o.ranks.dual_batch_tokens = 64;
  EXPECT_EQ(order_of(plain, o),
            "gate, router, dispatch, experts, combine; from 64 tokens on two batches at once: "
            "dispatch of both, experts of both, then the rest");
  o = overlap_options(0, pair);
  o.parallel.dp_size = 1;
  EXPECT_EQ(order_of(shared, o),
            "gate, router, experts, shared_experts, exchange with ranks of the same rows");
}

// Where several transports would do, explain chooses the one that runs.
TEST(Overlap, ExplainChoosesTheTransportOfTheOptions) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = overlap_options(0, pair);
  const auto accepted = [&](RankTransport transport) {
    o.ranks.transport = transport;
    std::string names;
    const auto explained = explain_layer(test::small_spec(), o);
    if (!explained.ok()) return explained.status().to_string();
    EXPECT_GT(explained->workspace_bytes, 0);
    for (const CandidateReport& row : explained->candidates) {
      EXPECT_EQ(row.accepted, row.reason.empty()) << row.name;
      if (row.stage == "prepare_finalize" && row.accepted) names += row.name + " ";
    }
    return names;
  };
  EXPECT_EQ(accepted(RankTransport::kAuto), "all_to_all ");
  EXPECT_EQ(accepted(RankTransport::kAllToAll), "all_to_all ");
  EXPECT_EQ(accepted(RankTransport::kGather), "all_gather_reduce_scatter ");
  EXPECT_EQ(accepted(RankTransport::kBatched), "all_to_all_batched ");
  o.parallel.dp_size = 1;
  EXPECT_EQ(accepted(RankTransport::kNone), "local ");
}

}  // namespace
}  // namespace moesaic
