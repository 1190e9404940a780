// What one rank of a layer refuses, or has other than the rest: the others are told at once.
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "layer/rank_case.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

// Long enough for a slow machine; a rank that waits so long was not told.
constexpr int kPatienceMs = 10000;
constexpr const char* kTold = "rank 1: ";

MoeLayerSpec spec_with_shared() {
  MoeLayerSpec spec = test::small_spec();
  spec.shared.intermediate_size = 16;
  return spec;
}

FusedMoE::Options options_of(int rank, int tp, int dp, RankTransport transport,
                             const std::shared_ptr<Communicator>& world) {
  ParallelSizes sizes;
  sizes.tp_size = tp;
  sizes.tp_rank = rank % tp;
  sizes.dp_size = dp;
  sizes.dp_rank = rank / tp;
  sizes.enable_expert_parallel = true;
  FusedMoE::Options options;
  options.num_threads = 1;
  options.max_tokens = 8;
  options.parallel = ParallelConfig::from_sizes(sizes).value();
  options.ranks.communicator = world;
  options.ranks.transport = transport;
  return options;
}

// Functions that change nothing.
void add_transform(std::int64_t hidden, FusedMoE::Options* options) {
  options->transform.hidden_size = hidden;
  options->transform.input = [](ConstTensorView from, TensorView to) {
    const std::int64_t row = from.dim(1) * dtype_bits(from.dtype) / 8;
    for (std::int64_t i = 0; i < from.dim(0); ++i) {
      std::memcpy(to.data + i * row, from.data + i * from.strides[0] * dtype_bits(from.dtype) / 8,
                  static_cast<std::size_t>(row));
    }
    return Status();
  };
  options->transform.output = [](ConstTensorView from, TensorView to) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(from.dim(0) * from.dim(1) * 4));
    return Status();
  };
}

// The body on two ranks, whose status must be what `check` wants of each.
void on_both(const std::function<Status(int, const std::shared_ptr<Communicator>&)>& body,
             const std::function<void(int, const Status&)>& check) {
  const std::vector<Status> found = test::on_two_ranks(body, kPatienceMs);
  for (int rank = 0; rank < 2; ++rank) check(rank, found[static_cast<std::size_t>(rank)]);
}

// Rank 1 has its own reason, the other is told it.
void expect_told(int rank, const Status& status, StatusCode code, const char* field) {
  if (rank == 1) {
    expect_refusal(status, code, {field});
  } else {
    expect_refusal(status, StatusCode::kInvalidArgument, {"rank 1 refused", field});
  }
}

TEST(RankRefusals, PartsThatDifferBetweenRanks) {
  const test::LayerTensors tensors = test::make_tensors(51, spec_with_shared());
  const test::MakeRankLayer make = test::maker_of(tensors);
  using Change = std::function<FusedMoE::Options(int, const std::shared_ptr<Communicator>&)>;
  const std::vector<Change> cases = {
      [](int rank, const auto& world) {  // one has shared experts
        FusedMoE::Options o = options_of(rank, 2, 1, RankTransport::kNone, world);
        o.include_shared = rank == 0;
        return o;
      },
      [](int rank, const auto& world) {  // one has transforms
        FusedMoE::Options o = options_of(rank, 2, 1, RankTransport::kNone, world);
        if (rank == 1) add_transform(64, &o);
        return o;
      },
      [](int rank, const auto& world) {  // one has the other's rows, the other its own
        return options_of(rank, rank == 0 ? 2 : 1, rank == 0 ? 1 : 2, RankTransport::kAllToAll,
                          world);
      }};
  for (const Change& options : cases) {
    on_both([&](int rank, const auto& world) { return make(options(rank, world)).status(); },
            [](int, const Status& status) {
              expect_refusal(status, StatusCode::kInvalidArgument, {"layer", "other options"});
            });
  }
}

TEST(RankRefusals, ValuesOutsideTheirEnumerations) {
  const test::LayerTensors tensors = test::make_tensors(51, spec_with_shared());
  const test::MakeRankLayer make = test::maker_of(tensors);
  struct Case {
    const char* words;
    std::function<void(RankOptions&)> spoil;
  };
  const std::vector<Case> cases = {
      {"transport: got 5", [](auto& r) { r.transport = static_cast<RankTransport>(5); }},
      {"reduction: got 2", [](auto& r) { r.reduction = static_cast<RankReduction>(2); }},
      {"rank_engine: got 3", [](auto& r) { r.engine = static_cast<RankEngine>(3); }},
      {"peer_memory: got 3", [](auto& r) { r.peer_memory = static_cast<PeerMemory>(3); }}};
  for (const Case& c : cases) {
    on_both(
        [&](int rank, const auto& world) {
          FusedMoE::Options o = options_of(rank, 1, 2, RankTransport::kGather, world);
          c.spoil(o.ranks);
          return make(o).status();
        },
        [&](int, const Status& status) {
          expect_refusal(status, StatusCode::kInvalidArgument, {c.words});
        });
  }
}

// Nothing that the other rank waits for, or sees: it would compute something else for the rows of
// this one.
TEST(RankRefusals, LayersThatWouldComputeDifferently) {
  MoeLayerSpec spec = test::small_spec();
  spec.quant = quant_scheme_from_name("fp8-block").value();
  spec.hidden_size = spec.intermediate_size = 128;
  test::LayerTensors tensors = test::make_tensors(53, spec);
  struct Case {
    const char* text;
    std::function<void(MoeLayerSpec&, FusedMoE::Options&)> change;
  };
  for (const Case& c :
       {Case{"layer is '4' there, '-1' here", [](auto&s, auto&) { s.layer = 4; }},
        Case{"activations is 'F8_E4M3, a power of two per 128 columns' there",
             [](auto&, auto&o) { o.activation_scales = ScaleFormat::kE8M0; }},
        Case{"activation is 'silu 2.5", [](auto&s, auto&) { s.activation.limit = 2.5F; }},
        Case{"routing is '", [](auto&s, auto&) { s.routing.renormalize = false; }},
        Case{"routing is '", [](auto&s, auto&) { s.routing.renorm_epsilon = 1e-6; }},
        Case{"routed_scaling_factor is '2.5' there, '1' here",
             [](auto&s, auto&) { s.routing.routed_scaling_factor = 2.5; }},
        Case{"eplb_window is '7' there, '1000' here",
             [](auto&, auto&o) { o.ranks.eplb_window = 7; }},
        Case{"max_tokens is '9' there, '8' here", [](auto&, auto&o) { ++o.max_tokens; }}}) {
    on_both(
        [&](int rank, const auto& world) -> Status {
          FusedMoE::Options o = options_of(rank, 1, 2, RankTransport::kAllToAll, world);
          o.ranks.enable_eplb = true;
          MoeLayerWeights weights = tensors.weights();
          if (rank == 1) c.change(weights.spec, o);
          const Status refused = FusedMoE::create(std::move(weights), o).status();
          EXPECT_TRUE(world->state().ok());  // nothing is broken
          return refused;
        },
        [&](int rank, const Status& status) {
          expect_refusal(status, StatusCode::kInvalidArgument, {"layer", "other options"});
          if (rank == 0) expect_refusal(status, StatusCode::kInvalidArgument, {c.text});
        });
  }
}

TEST(RankRefusals, WhatOneRankRefusesIsToldByItsNumber) {
  const test::LayerTensors tensors = test::make_tensors(51, test::small_spec());
  auto ranks = make_in_process_communicators(4, {.timeout_ms = kPatienceMs}).value();
  std::vector<Status> found(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      const auto r = static_cast<std::size_t>(rank);
      FusedMoE::Options o = options_of(rank, 2, 2, RankTransport::kGather,
                                       std::shared_ptr<Communicator>(std::move(ranks[r])));
      o.ranks.reduce_results = false;
      const FusedMoE layer = std::move(test::maker_of(tensors)(o)).value();
      Tensor y = Tensor::zeros(rank == 3 ? DType::kI32 : DType::kF32, {6, 64}).value();
      found[r] = layer.maybe_all_reduce(y.view());
    });
  }
  for (std::thread& t : threads) t.join();
  // Ranks 2 and 3 have the same rows; the others do not meet them.
  EXPECT_TRUE(found[0].ok() && found[1].ok());
  expect_refusal(found[2], StatusCode::kInvalidArgument, {"rank 3 refused: invalid_dtype: x"});
  expect_refusal(found[3], StatusCode::kInvalidDType, {"x"});
}

// A caller's function that refuses or throws, on rank 1.
TEST(RankRefusals, TransformsThatFail) {
  const test::LayerTensors tensors = test::make_tensors(51, spec_with_shared());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const std::int64_t hidden = tensors.spec.hidden_size;
  const Tensor x = test::random_hidden(52, 6, hidden);
  const auto refuse = [](ConstTensorView, TensorView) {
    return Status(StatusCode::kInvalidArgument, "not today");
  };
  const auto thrown = [](ConstTensorView, TensorView) -> Status {
    throw std::runtime_error("not today");
  };
  for (const int tp : {2, 1}) {
    for (const bool throws : {false, true}) {
      for (const bool input : {false, true}) {
        on_both(
            [&](int rank, const auto& world) -> Status {
              FusedMoE::Options o =
                  options_of(rank, tp, 3 - tp,
                             tp == 2 ? RankTransport::kNone : RankTransport::kAllToAll, world);
              add_transform(hidden, &o);
              auto& function = input ? o.transform.input : o.transform.output;
              if (rank == 1 && throws) function = thrown;
              if (rank == 1 && !throws) function = refuse;
              MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(o));
              Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
              const Status status = layer.forward(x.view(), y.view());
              // Whose own rows are complete learns of it in the next call.
              return status.ok() && rank == 0 ? layer.forward(x.view(), y.view()) : status;
            },
            [&](int rank, const Status& status) {
              const char* name = input ? "transform.input" : "transform.output";
              if (rank == 1) {
                expect_refusal(status, StatusCode::kInvalidArgument, {name, "not today"});
              } else {
                EXPECT_NE(status.message().find(kTold), std::string::npos) << status.to_string();
                EXPECT_NE(status.message().find("not today"), std::string::npos)
                    << status.to_string();
              }
            });
      }
    }
  }
}

TEST(RankRefusals, SumsThatOneRankRefuses) {
  const test::LayerTensors tensors = test::make_tensors(51, spec_with_shared());
  const test::MakeRankLayer make = test::maker_of(tensors);
  on_both(
      [&](int rank, const auto& world) -> Status {
        FusedMoE::Options o = options_of(rank, 2, 1, RankTransport::kNone, world);
        o.ranks.reduce_results = false;
        MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(o));
        Tensor y = Tensor::zeros(rank == 1 ? DType::kI32 : DType::kF32, {6, 64}).value();
        const Status refused = layer.maybe_all_reduce(y.view());
        // A view of elements without memory.
        TensorView none = Tensor::zeros(DType::kF32, {6, 64}).value().view();
        none.data = nullptr;
        expect_refusal(layer.maybe_all_reduce(none), StatusCode::kInvalidArgument,
                       {"x: got a null pointer"});
        // Nothing is broken by it, nor by other sizes.
        Tensor z = Tensor::zeros(DType::kF32, {6, 64}).value();
        MOESAIC_RETURN_IF_ERROR(layer.maybe_all_reduce(z.view()));
        Tensor more = Tensor::zeros(DType::kF32, {6 + rank, 64}).value();
        expect_refusal(layer.maybe_all_reduce(more.view()), StatusCode::kInvalidArgument,
                       {"maybe_all_reduce"});
        return refused;
      },
      [](int rank, const Status& status) {
        expect_told(rank, status, StatusCode::kInvalidDType, "x");
      });
}

TEST(RankRefusals, PlansThatOneRankRefuses) {
  const test::LayerTensors tensors = test::make_tensors(51, test::small_spec());
  on_both(
      [&](int rank, const auto& world) -> Status {
        FusedMoE::Options o = options_of(rank, 1, 2, RankTransport::kAllToAll, world);
        o.ranks.enable_eplb = true;
        o.ranks.num_redundant_experts = 2;
        MOESAIC_ASSIGN_OR_RETURN(FusedMoE layer, FusedMoE::create(tensors.weights(), o));
        const Status refused = layer.begin_rebalance(rank == 1 ? 0 : 1);
        MOESAIC_RETURN_IF_ERROR(layer.begin_rebalance(1));  // nothing is broken
        return refused;
      },
      [](int rank, const Status& status) {
        expect_told(rank, status, StatusCode::kInvalidArgument, "num_nodes");
      });
}

}  // namespace
}  // namespace moesaic
