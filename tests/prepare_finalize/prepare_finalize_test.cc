#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::small_problem;

MoeProblem batched_problem(std::int64_t rows) {
  MoeProblem p = small_problem("bf16");
  p.format = ActivationFormat::kBatched;
  p.max_tokens = rows;
  return p;
}

struct Call {
  test::OwnedRouting routing;
  Tensor hidden_states;
  Tensor workspace;
  PrepareArgs args(std::span<const std::int32_t> map = {}) {
    return {hidden_states.view(),
            routing.weights.view(),
            routing.ids.view(),
            map,
            {workspace.data(), static_cast<std::size_t>(workspace.bytes())}};
  }
};

Call make_call(const PrepareAndFinalize& pf, const MoeProblem& p, std::int64_t tokens,
               DType dtype = DType::kBF16) {
  test::Rng rng(7);
  Call c;
  c.routing = test::random_routing(8, tokens, p.num_experts, p.top_k, 0.2);
  c.hidden_states = test::random_normal(rng, dtype, {tokens, p.hidden_size});
  c.workspace = test::poisoned_bytes(pf.workspace_size(tokens).value());
  return c;
}

TEST(LocalPrepareFinalize, HandsOverTheCallersOwnTensors) {
  const MoeProblem p = small_problem("bf16");
  const auto pf = make_local_prepare_finalize(p).value();
  EXPECT_EQ(pf->format(), ActivationFormat::kStandard);
  EXPECT_FALSE(pf->output_is_reduced());
  EXPECT_TRUE(pf->keeps_rows());
  Call c = make_call(*pf, p, 5);
  const Prepared prepared = pf->prepare(c.args()).value();
  EXPECT_EQ(prepared.hidden_states.data, c.hidden_states.data());
  EXPECT_FALSE(prepared.topk_ids.present());
  EXPECT_FALSE(prepared.topk_weights.present());
}

TEST(LocalPrepareFinalize, DelegatedReductionIsContiguousAndSlabsAreRefused) {
  const MoeProblem p = small_problem("bf16");
  const auto pf = make_local_prepare_finalize(p).value();
  test::Rng rng(9);
  const Tensor rows = test::random_normal(rng, DType::kF32, {10, p.hidden_size});
  const test::OwnedRouting routing = test::random_routing(8, 5, p.num_experts, p.top_k, 0.2);
  std::vector<Tensor> outputs;
  for (const auto reduction : {TopKWeightAndReduce::kContiguous, TopKWeightAndReduce::kDelegate}) {
    outputs.push_back(Tensor::uninitialized(DType::kF32, {5, p.hidden_size}).value());
    test::poison(outputs.back().view());
    ASSERT_TRUE(pf->finalize({outputs.back().view(),
                              rows.view(),
                              routing.weights.view(),
                              routing.ids.view(),
                              {},
                              reduction,
                              false,
                              {}})
                    .ok());
  }
  std::string why;
  EXPECT_TRUE(test::same_bits(outputs[0].view(), outputs[1].view(), &why)) << why;
  const Status status = pf->finalize({outputs[0].view(),
                                      rows.view(),
                                      routing.weights.view(),
                                      routing.ids.view(),
                                      {},
                                      TopKWeightAndReduce::kNaiveBatched,
                                      false,
                                      {}});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
}

// Says how its reduction is left, and nothing else.
class ExpertsThatLeave final : public Experts {
 public:
  explicit ExpertsThatLeave(TopKWeightAndReduce reduction) : reduction_(reduction) {}
  std::string_view name() const override { return "leaving"; }
  TopKWeightAndReduce reduction() const override { return reduction_; }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Result<std::int64_t> workspace_size(std::int64_t) const override { return std::int64_t{0}; }
  Status run(const ExpertsArgs&) const override { return {}; }
  std::int64_t weight_bytes() const override { return 0; }
  std::string_view determinism() const override { return ""; }

 private:
  TopKWeightAndReduce reduction_;
};

// A GPU's rows are added up there, and never by loops of the host.
TEST(LocalPrepareFinalize, RowsOfAGpuAreReducedThere) {
  MoeProblem p = small_problem("bf16");
  using enum TopKWeightAndReduce;
  for (const auto reduction : {kNoOp, kContiguous, kDelegate, kNaiveBatched}) {
    const ExpertsThatLeave experts(reduction);
    for (const Device device : {Device::cpu(), Device::cuda(0)}) {
      p.device = device;
      EXPECT_EQ(make_local_prepare_finalize(p).value()->attach(experts).ok(),
                reduction != kNaiveBatched);
    }
  }
  const auto pf = make_local_prepare_finalize(p).value();
  Tensor rows = Tensor::zeros(DType::kF32, {10, p.hidden_size}).value();
  Tensor output = Tensor::zeros(DType::kF32, {5, p.hidden_size}).value();
  const test::OwnedRouting routing = test::random_routing(8, 5, p.num_experts, p.top_k, 0.2);
  const Status host = pf->finalize({output.view(),
                                    rows.view(),
                                    routing.weights.view(),
                                    routing.ids.view(),
                                    {},
                                    kContiguous,
                                    false,
                                    {}});
  EXPECT_FALSE(host.ok());  // no device, or no memory of it
}

TEST(BatchedPrepareFinalize, FillsSlabsInAscendingTokenOrder) {
  const MoeProblem p = batched_problem(5);
  const auto pf = make_batched_prepare_finalize(p).value();
  EXPECT_EQ(pf->format(), ActivationFormat::kBatched);
  Call c = make_call(*pf, p, 5);
  const std::vector<std::int32_t> map = {0, -1, 1, 2, -1, 3};
  MoeProblem part = p;
  part.num_local_experts = 4;
  const auto rank = make_batched_prepare_finalize(part).value();
  const std::vector<std::byte> before(c.hidden_states.data(),
                                      c.hidden_states.data() + c.hidden_states.bytes());
  const Prepared prepared = rank->prepare(c.args(map)).value();
  EXPECT_EQ(prepared.hidden_states.shape, (Shape{4, 5, p.hidden_size}));
  EXPECT_EQ(prepared.hidden_states.dtype, DType::kBF16);
  std::vector<std::int32_t> seen(4);
  const std::int64_t row_bytes = p.hidden_size * 2;
  for (std::int64_t t = 0; t < 5; ++t) {
    for (std::int64_t j = 0; j < 2; ++j) {
      const std::int32_t id = c.routing.ids.as<std::int32_t>()[t * 2 + j];
      const std::int32_t e = id < 0 ? -1 : map[static_cast<std::size_t>(id)];
      if (e < 0) continue;
      const std::int64_t row = e * 5 + seen[static_cast<std::size_t>(e)]++;
      EXPECT_TRUE(std::equal(c.hidden_states.data() + t * row_bytes,
                             c.hidden_states.data() + (t + 1) * row_bytes,
                             prepared.hidden_states.data + row * row_bytes))
          << "token " << t << " slot " << j;
    }
  }
  EXPECT_EQ(std::vector<std::int32_t>(prepared.expert_num_tokens.begin(),
                                      prepared.expert_num_tokens.end()),
            seen);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), c.hidden_states.data()));
}

TEST(BatchedPrepareFinalize, TheWeightOnTheInputIsRoundedLikeTheExpertsAndNotInPlace) {
  MoeProblem p = batched_problem(4);
  p.top_k = 1;
  p.apply_router_weight_on_input = true;
  const auto pf = make_batched_prepare_finalize(p).value();
  Call c = make_call(*pf, p, 4);
  for (int t = 0; t < 4; ++t) {
    c.routing.ids.as<std::int32_t>()[t] = t;
    c.routing.weights.as<float>()[t] = 0.3F;                          // bf16: 0.30078125
    c.hidden_states.as<std::uint16_t>()[t * p.hidden_size] = 0x3F81;  // 1.0078125
  }
  const Prepared prepared = pf->prepare(c.args()).value();
  for (std::int64_t e = 0; e < 4; ++e) {
    const auto* row = prepared.hidden_states.as<std::uint16_t>() + e * 4 * p.hidden_size;
    EXPECT_EQ(row[0], 0x3E9B);  // 1.0078125 * 0.30078125 = 0.303131..., to bf16
  }
  EXPECT_EQ(c.hidden_states.as<std::uint16_t>()[0], 0x3F81);
}

TEST(BatchedPrepareFinalize, MoreThanTRowsForAnExpertAreRefused) {
  const MoeProblem p = batched_problem(2);
  const auto pf = make_batched_prepare_finalize(p).value();
  Call c = make_call(*pf, p, 3);
  for (int i = 0; i < 6; ++i) c.routing.ids.as<std::int32_t>()[i] = i % 2 == 0 ? 4 : -1;
  const auto prepared = pf->prepare(c.args());
  ASSERT_FALSE(prepared.ok());
  EXPECT_EQ(prepared.status().code(), StatusCode::kLimitExceeded);
  EXPECT_NE(prepared.status().message().find("local expert 4: got more than 2 rows"),
            std::string::npos);
  EXPECT_NE(prepared.status().message().find("T = 2"), std::string::npos);
}

TEST(BatchedPrepareFinalize, RefusesBadIdsAndOtherReductions) {
  const MoeProblem p = batched_problem(4);
  const auto pf = make_batched_prepare_finalize(p).value();
  Call c = make_call(*pf, p, 3);
  c.routing.ids.as<std::int32_t>()[3] = 6;
  EXPECT_EQ(pf->prepare(c.args()).status().code(), StatusCode::kInvalidArgument);
  Tensor out = Tensor::zeros(DType::kF32, {3, p.hidden_size}).value();
  const Status status = pf->finalize({out.view(),
                                      c.hidden_states.view(),
                                      c.routing.weights.view(),
                                      c.routing.ids.view(),
                                      {},
                                      TopKWeightAndReduce::kNoOp,
                                      false,
                                      {}});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_FALSE(pf->workspace_size(-1).ok());
}

// For who calls these without a ModularKernel, which has checked everything before.
TEST(BatchedPrepareFinalize, PrepareChecksWhatItReads) {
  const MoeProblem p = batched_problem(4);
  const auto pf = make_batched_prepare_finalize(p).value();
  Call c = make_call(*pf, p, 3);
  const auto refused = [&](auto spoil, StatusCode code, const char* words) {
    PrepareArgs args = c.args();
    spoil(args);
    test::expect_refusal(pf->prepare(args).status(), code, {words});
  };
  using A = PrepareArgs;
  const std::byte* x = c.hidden_states.data();
  const std::byte* ids = c.routing.ids.data();
  ASSERT_TRUE(pf->prepare(c.args()).ok());
  refused(
      [&](A& a) {
        a.hidden_states = {x, DType::kBF16, {3, 48}};
      },
      StatusCode::kInvalidShape, "hidden_states: got [3, 48]");
  refused([&](A& a) { a.hidden_states = {}; }, StatusCode::kInvalidShape, "hidden_states: got []");
  refused([&](A& a) { a.hidden_states.dtype = DType::kI16; }, StatusCode::kInvalidDType,
          "hidden_states: got I16");
  refused([&](A& a) { a.hidden_states.data = nullptr; }, StatusCode::kInvalidArgument,
          "hidden_states: got a null pointer");
  refused([&](A& a) { a.hidden_states.strides[0] = -96; }, StatusCode::kInvalidLayout,
          "hidden_states: got rows -96 elements apart");
  refused([&](A& a) { a.hidden_states.device = Device::cuda(0); }, StatusCode::kInvalidArgument,
          "hidden_states: got memory of cuda:0");
  refused(
      [&](A& a) {
        a.topk_ids = {ids, DType::kI32, {2, 2}};
      },
      StatusCode::kInvalidShape, "topk_ids: got [2, 2], need [3, 2]");
  refused([&](A& a) { a.topk_ids.dtype = DType::kI64; }, StatusCode::kInvalidDType,
          "topk_ids: got I64");
  refused([&](A& a) { a.topk_weights = {}; }, StatusCode::kInvalidShape, "topk_weights: got []");
  const std::vector<std::int32_t> map(5, 0);
  refused([&](A& a) { a.expert_map = map; }, StatusCode::kInvalidShape, "expert_map: got [5]");
}

TEST(PrepareFinalize, FinalizeChecksWhatItReadsAndWrites) {
  const MoeProblem batched = batched_problem(4);
  MoeProblem p = small_problem("bf16");
  p.max_tokens = 4;
  for (const bool slabs : {false, true}) {
    const auto pf = slabs ? make_batched_prepare_finalize(batched).value()
                          : make_local_prepare_finalize(p).value();
    Call c = make_call(*pf, slabs ? batched : p, 3);
    ASSERT_TRUE(pf->prepare(c.args()).ok());
    const Shape shape = slabs ? Shape{6, 4, 96} : Shape{6, 96};
    const Tensor rows = Tensor::zeros(DType::kF32, shape).value();
    Tensor out = Tensor::zeros(DType::kF32, {3, 96}).value();
    const auto finalize = [&](auto spoil) {
      FinalizeArgs args{out.view(),
                        rows.view(),
                        c.routing.weights.view(),
                        c.routing.ids.view(),
                        {},
                        TopKWeightAndReduce::kDelegate,
                        false,
                        c.args().workspace};
      spoil(args);
      return pf->finalize(args);
    };
    using A = FinalizeArgs;
    EXPECT_TRUE(finalize([](A&) {}).ok());
    const auto refused = [&](auto spoil, StatusCode code, const char* words) {
      test::expect_refusal(finalize(spoil), code, {words});
    };
    refused(
        [&](A& a) {
          a.output = {out.data(), DType::kF32, {3, 48}};
        },
        StatusCode::kInvalidShape, "output: got [3, 48]");
    refused([&](A& a) { a.output.strides[0] = 192; }, StatusCode::kInvalidLayout, "output");
    refused([&](A& a) { a.output.dtype = DType::kI32; }, StatusCode::kInvalidDType,
            "output: got I32");
    refused([&](A& a) { a.output.data = nullptr; }, StatusCode::kInvalidArgument,
            "output: got a null pointer");
    refused([&](A& a) { a.expert_output.dtype = DType::kI32; }, StatusCode::kInvalidDType,
            "expert_output: got I32");
    refused([&](A& a) { a.expert_output.data = nullptr; }, StatusCode::kInvalidArgument,
            "expert_output: got a null pointer");
    refused(
        [&](A& a) {
          a.topk_ids.shape = Shape{2, 2};
        },
        StatusCode::kInvalidShape, "topk_ids: got [2, 2]");
    refused([&](A& a) { a.topk_weights.data = nullptr; }, StatusCode::kInvalidArgument,
            "topk_weights: got a null pointer");
    refused(
        [&](A& a) {
          a.expert_output.shape = slabs ? Shape{5, 4, 96} : Shape{5, 96};
        },
        StatusCode::kInvalidShape, "expert_output: got [5, ");
  }
}

// Accepted rows in order, for ranks that have rows of their own (dp), or one process.
std::vector<std::string> accepted(ActivationFormat format, const ParallelConfig& parallel,
                                  Device device = Device::cpu()) {
  MoeProblem p = small_problem("bf16");
  p.activation_dtype = DType::kBF16;
  p.format = format;
  p.device = device;
  std::vector<std::string> names;
  for (const CandidateReport& row : explain_prepare_finalize(p, parallel)) {
    EXPECT_EQ(row.stage, "prepare_finalize");
    EXPECT_EQ(row.accepted, row.reason.empty());
    if (row.accepted) names.push_back(row.name);
    const bool said = row.reason.find("format") != std::string::npos ||
                      row.reason.find("parallel") != std::string::npos ||
                      row.reason.find("device") != std::string::npos;
    EXPECT_TRUE(row.accepted || said) << row.reason;
  }
  return names;
}

TEST(PrepareFinalizeCatalogue, AcceptsWhatFormatAndRanksAllow) {
  using Names = std::vector<std::string>;
  const auto standard = ActivationFormat::kStandard;
  const auto batched = ActivationFormat::kBatched;
  EXPECT_EQ(accepted(standard, {}), Names{"local"});
  EXPECT_EQ(accepted(batched, {}), Names{"batched_reference"});
  // All ranks have the same rows: nothing moves.
  ParallelConfig replicas;
  replicas.ep_size = 4;
  EXPECT_EQ(accepted(standard, replicas), Names{"local"});
  ParallelConfig data = replicas;
  data.dp_size = 4;
  EXPECT_EQ(accepted(standard, data), (Names{"all_to_all", "all_gather_reduce_scatter"}));
  EXPECT_EQ(accepted(batched, data), Names{"all_to_all_batched"});
  // Slices of every expert: all ranks need all rows.
  ParallelConfig slices;
  slices.tp_size = slices.dp_size = 2;
  EXPECT_EQ(accepted(standard, slices), Names{"all_gather_reduce_scatter"});
  EXPECT_EQ(accepted(batched, slices), Names{});
  // On a GPU: its own transports.
  const Device gpu = Device::cuda(0);
  EXPECT_EQ(accepted(standard, {}, gpu), Names{"local"});
  EXPECT_EQ(accepted(standard, data, gpu),
            (Names{"cuda_all_to_all", "cuda_all_gather_reduce_scatter"}));
  EXPECT_EQ(accepted(batched, {}, gpu), Names{"batched_reference"});
  EXPECT_EQ(accepted(batched, data, gpu), Names{"cuda_all_to_all_batched"});
  EXPECT_EQ(accepted(standard, slices, gpu), Names{"cuda_all_gather_reduce_scatter"});
  // Slabs of 16 rows do not divide by three ranks.
  ParallelConfig three;
  three.ep_size = three.dp_size = 3;
  MoeProblem p = small_problem("bf16");
  p.format = batched;
  EXPECT_NE(explain_prepare_finalize(p, three).back().reason.find("multiple of ep size 3"),
            std::string::npos);
}

TEST(PrepareFinalizeCatalogue, RanksThatCannotBeAreAReasonAndManyAreNoList) {
  const auto refused = [](const ParallelConfig& parallel, const char* why) {
    for (const ActivationFormat format :
         {ActivationFormat::kStandard, ActivationFormat::kBatched}) {
      MoeProblem p = small_problem("bf16");
      p.format = format;
      bool told = false;
      for (const CandidateReport& row : explain_prepare_finalize(p, parallel)) {
        EXPECT_FALSE(row.accepted) << row.name;
        told = told || row.reason.find(why) != std::string::npos;
      }
      EXPECT_TRUE(told) << why;
    }
  };
  ParallelConfig parallel;
  parallel.dp_size = 2;
  refused(parallel, "parallel: dp_size: got 2, need a divisor of the flattened size 1");
  parallel.dp_size = 0;
  refused(parallel, "parallel: dp_size: got 0");
  parallel = {};
  parallel.ep_size = 0;
  refused(parallel, "parallel: ep_size: got 0");
  parallel = {};
  parallel.ep_size = parallel.dp_size = 2147483647;
  const auto reports = explain_prepare_finalize(small_problem("bf16"), parallel);
  EXPECT_NE(reports.front().reason.find("2147483647 ranks have rows"), std::string::npos);
}

TEST(PrepareFinalizeCatalogue, RowsMakeWhatTheyName) {
  const std::shared_ptr<Communicator> self =
      std::move(make_in_process_communicators(1).value().front());
  AllToAllOptions options;
  options.max_tokens_per_rank = 16;
  for (const PrepareFinalizeBackend& row : prepare_finalize_catalogue()) {
    MoeProblem p = small_problem("bf16");
    if (row.name.find("batched") != std::string_view::npos) p.format = ActivationFormat::kBatched;
    EXPECT_FALSE(row.description.empty());
    const auto made = row.create(p, self, options);
    if (row.name.starts_with("cuda_")) {
      test::expect_refusal(made.status(), StatusCode::kUnsupported, {"device: cpu", "Hopper"});
      continue;
    }
    ASSERT_TRUE(made.ok()) << made.status().message();
    EXPECT_EQ((*made)->name(), row.name);
  }
}

TEST(PrepareFinalizeCatalogue, TransportsOfAGpuSayWhatTheyNeed) {
  const std::shared_ptr<Communicator> self =
      std::move(make_in_process_communicators(1).value().front());
  AllToAllOptions options;
  options.max_tokens_per_rank = 16;
  const auto refused = [&](const std::function<void(MoeProblem&)>& change, StatusCode code,
                           std::initializer_list<const char*> words) {
    MoeProblem p = small_problem("bf16");
    p.device = Device::cuda(99);
    p.activation_dtype = DType::kBF16;
    change(p);
    test::expect_refusal(make_all_to_all_prepare_finalize(p, self, options).status(), code, words);
  };
  const Status missing = check_device(Device::cuda(99));
  refused([](MoeProblem&) {}, missing.code(), {missing.message().c_str()});
  refused([](MoeProblem& p) { p.hidden_size = 100; }, missing.code(), {missing.message().c_str()});
  refused([](MoeProblem& p) { p.quant = small_problem("f32").quant; }, missing.code(),
          {missing.message().c_str()});
  refused([](MoeProblem& p) { p.format = ActivationFormat::kBatched; }, StatusCode::kUnsupported,
          {"batched activations"});
}

// What its kernels do not take as it is travels as longer rows, or unquantised.
TEST(PrepareFinalizeCatalogue, RowsOfAGpuTravelAsBf16WithZerosWhereTheyMust) {
  const auto carried = [](std::string_view quant, std::int64_t hidden) {
    MoeProblem p = small_problem(quant);
    p.hidden_size = hidden;
    p.device = Device::cuda(0);
    const MoeProblem c = cuda::carried_problem(p);
    EXPECT_TRUE(cuda::sm90_rows_can_travel(c).ok());
    EXPECT_EQ(cuda::sm90_rows_can_travel(p).ok(),
              c.quant.name == p.quant.name && c.hidden_size == hidden);
    return fmt::format("{} {}", c.quant.name, c.hidden_size);
  };
  EXPECT_EQ(carried("bf16", 64), "bf16 64");
  EXPECT_EQ(carried("bf16", 100), "bf16 104");
  EXPECT_EQ(carried("int8", 100), "bf16 104");
  EXPECT_EQ(carried("fp8-block", 256), "fp8-block 256");
  EXPECT_EQ(carried("fp8-block", 192), "bf16 192");
  EXPECT_EQ(carried("fp8-block", 100), "bf16 104");
  EXPECT_EQ(carried("f32", 100), "f32 104");
  EXPECT_EQ(carried("f16", 96), "f16 96");
  // Codes are made once for all experts of a token: not times the weight of each.
  MoeProblem p = small_problem("fp8-block");
  EXPECT_TRUE(cuda::travels_as_codes(p));
  p.apply_router_weight_on_input = true;
  p.top_k = 1;
  EXPECT_TRUE(cuda::travels_as_codes(p));
  p.top_k = 2;
  EXPECT_FALSE(cuda::travels_as_codes(p));
}

TEST(PrepareFinalizeCatalogue, TheBatchedReferenceOfAGpuSaysWhatItNeeds) {
  MoeProblem p = batched_problem(4);
  p.device = Device::cuda(99);
  const Status missing = check_device(p.device);
  test::expect_refusal(make_batched_prepare_finalize(p).status(), missing.code(),
                       {missing.message().c_str()});
  p.num_experts = p.num_local_experts = 1025;
  test::expect_refusal(make_batched_prepare_finalize(p).status(), StatusCode::kUnsupported,
                       {"num_local_experts: got 1025, need at most 1024"});
  p = batched_problem((std::int64_t{1} << 30) / 6 + 1);
  p.device = Device::cuda(99);
  test::expect_refusal(make_batched_prepare_finalize(p).status(), StatusCode::kUnsupported,
                       {"max_tokens: got 178956971 rows for each of 6 local experts"});
}

TEST(PrepareFinalizeCatalogue, FormatsAreRefused) {
  EXPECT_EQ(make_local_prepare_finalize(batched_problem(4)).status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(make_batched_prepare_finalize(small_problem("bf16")).status().code(),
            StatusCode::kUnsupported);
  const Status no_rows = make_batched_prepare_finalize(batched_problem(0)).status();
  EXPECT_EQ(no_rows.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(no_rows.message().find("T >= 1"), std::string::npos);
}

}  // namespace
}  // namespace moesaic
