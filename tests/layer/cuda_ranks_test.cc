// The layer over ranks that share one GPU: threads that send through host memory. Equal to one rank
// however it is spread. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "layer/cuda_rank_case.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::DeviceBytes;
using test::expect_refusal;
using test::gpu_problem;
using test::make_layer;
using test::RankCombo;
using test::RankProblem;
using test::runs_on_gpus;
using test::two_engines;

TEST(CudaRanks, EveryCombinationOfRanksOnOneGpuEqualsOneRank) {
  REQUIRE_HOPPER();
  int runs = 0;
  for (const test::Feature& f : test::rank_features()) {
    const test::LayerTensors tensors = test::make_tensors(41, f.spec());
    RankProblem problem = gpu_problem(tensors, 19);
    for (const int ranks : {2, 4}) {
      for (const RankCombo& combo : test::rank_combos(ranks)) {
        if (!runs_on_gpus(combo, tensors.spec)) continue;
        problem.bound = test::bound_on_gpus(combo);
        const auto tokens = test::uneven_tokens(5, 19, combo.dp * combo.pcp);
        EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << f.name << " " << combo.name();
        ++runs;
      }
    }
  }
  EXPECT_GT(runs, 100);
}

// A row that travels once for several experts is not multiplied by the weight of any of them.
TEST(CudaRanks, WeightsOnTheInputsOfSeveralExpertsEqualOneRank) {
  REQUIRE_HOPPER();
  int runs = 0;
  MoeLayerSpec spec = test::llama4_like();
  spec.routing.top_k = 3;
  spec.hidden_size = spec.intermediate_size = 128;
  spec.shared.intermediate_size = 0;
  spec.quant = quant_scheme_from_name("fp8-block").value();
  const test::LayerTensors tensors = test::make_tensors(45, spec);
  RankProblem problem = gpu_problem(tensors, 13);
  for (const RankCombo& combo : test::rank_combos(2)) {
    if (!combo.ep || !runs_on_gpus(combo, tensors.spec)) continue;
    problem.bound = test::bound_on_gpus(combo);
    const auto tokens = test::uneven_tokens(5, 13, combo.dp * combo.pcp);
    EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
    ++runs;
  }
  EXPECT_GT(runs, 4);
}

// reduce_results = false: what is left to the caller is one sum.
TEST(CudaRanks, OneSumCompletesWhatIsNotReduced) {
  REQUIRE_HOPPER();
  int runs = 0;
  for (const test::Feature& f : test::rank_features()) {
    const test::LayerTensors tensors = test::make_tensors(44, f.spec());
    RankProblem problem = gpu_problem(tensors, 11);
    problem.options.ranks.reduce_results = false;
    for (const RankCombo& combo : test::rank_combos(4)) {
      if (combo.tp == 1 || !runs_on_gpus(combo, tensors.spec)) continue;
      problem.bound = test::bound_on_gpus(combo);
      const auto tokens = test::uneven_tokens(5, 11, combo.dp * combo.pcp);
      EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << f.name << " " << combo.name();
      ++runs;
    }
  }
  EXPECT_GT(runs, 30);
}

// More ranks than experts, all rows on one rank.
TEST(CudaRanks, RanksWithoutExpertsOrRows) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = test::small_spec();
  spec.num_experts = spec.routing.num_experts = 2;
  const test::LayerTensors tensors = test::make_tensors(42, spec);
  RankProblem problem = gpu_problem(tensors, 8);
  for (const RankCombo& combo : test::rank_combos(3)) {
    if (!combo.ep || !runs_on_gpus(combo, spec)) continue;
    problem.bound = test::bound_on_gpus(combo);
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(combo.dp * combo.pcp), 0);
    tokens.back() = 8;
    EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
  }
}

TEST(CudaRanks, RoundedPartialSumsStayWithinTheirBound) {
  REQUIRE_HOPPER();
  const test::LayerTensors tensors = test::make_tensors(43, test::rank_features()[1].spec());
  RankProblem problem = gpu_problem(tensors, 30);
  problem.options.ranks.combine_dtype = DType::kBF16;
  problem.bound = 0x1p-8;
  for (const auto transport : {RankTransport::kAllToAll, RankTransport::kGather}) {
    RankCombo combo;
    combo.dp = 2;
    combo.ep = true;
    combo.transport = transport;
    EXPECT_EQ(test::run_ranks(problem, combo, {11, 19}), "") << combo.name();
    problem.bound = 1e-6;  // it is not the exact path
    EXPECT_NE(test::run_ranks(problem, combo, {11, 19}), "");
    problem.bound = 0x1p-8;
  }
}

TEST(CudaRanks, ACommunicatorOfOneRankChangesNothing) {
  REQUIRE_HOPPER();
  const test::LayerTensors tensors = test::make_tensors(44, test::deepseek_like());
  FusedMoE::Options options;
  options.device = Device::cuda(0);
  const test::LayerRun want = test::run_layer(make_layer(tensors, options),
                                              test::random_hidden(5, 9, tensors.spec.hidden_size));
  options.ranks.communicator = std::move(make_in_process_communicators(1).value().front());
  const test::LayerRun got = test::run_layer(make_layer(tensors, options),
                                             test::random_hidden(5, 9, tensors.spec.hidden_size));
  std::string why;
  EXPECT_TRUE(test::same_bits(got.output.view(), want.output.view(), &why)) << why;
}

// Kernels that are loaded at their first launch could wait for each other: the reason is told.
TEST(CudaRanks, WithoutEagerLoadingRowsAreMessages) {
  REQUIRE_HOPPER();
  if (peer_windows_available().ok()) GTEST_SKIP() << "kernels are loaded when CUDA starts";
  const test::LayerTensors tensors = test::make_tensors(47, test::deepseek_like());
  const auto make = test::maker_of(tensors);
  for (const Status& s :
       test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
         FusedMoE::Options o = two_engines(rank, c);
         o.ranks.engine = RankEngine::kPeerWindows;
         expect_refusal(make(o).status(), StatusCode::kUnsupported, {"CUDA_MODULE_LOADING=EAGER"});
         o.ranks.engine = RankEngine::kAuto;
         const auto layer = make(o);
         if (!layer.ok()) return layer.status();
         EXPECT_NE(layer->summary().find("by messages (peer windows: kernels are loaded"),
                   std::string::npos)
             << layer->summary();
         const Tensor x = test::random_hidden(3, 2 + rank, 64);
         Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
         MOESAIC_RETURN_IF_ERROR(layer->forward(x.view(), y.view()));
         return layer->health();
       })) {
    EXPECT_TRUE(s.ok()) << s.to_string();
  }
}

// --- Device tensors, failures --------------------------------------------------------------------

TEST(CudaRanks, EnqueueWorksOnDeviceTensorsAndRefusesCapture) {
  REQUIRE_HOPPER();
  const test::LayerTensors tensors = test::make_tensors(45, test::deepseek_like());
  const auto make = test::maker_of(tensors);
  for (
      const Status& s : test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) {
        const auto layer = make(two_engines(rank, c));
        if (!layer.ok()) return layer.status();
        const std::int64_t rows = rank == 0 ? 19 : 0, hidden = 64;  // three steps of 8
        const Tensor x = test::random_hidden(3, rows, hidden);
        Tensor host = Tensor::zeros(DType::kF32, {rows, hidden}).value();
        Status status = layer->forward(x.view(), host.view());
        if (!status.ok()) return status;
        const DeviceBytes in(x.data(), x.bytes()), out(rows * hidden * 4);
        const ConstTensorView from(in.as<const std::byte>(), DType::kBF16, Shape{rows, hidden},
                                   layer->device());
        const TensorView to(out.as<std::byte>(), DType::kF32, Shape{rows, hidden}, layer->device());
        cudaStream_t stream = nullptr;
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        status = layer->enqueue({stream}, from, to);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        if (status.ok() && rows > 0) {
          std::vector<float> got(static_cast<std::size_t>(rows * hidden));
          out.download(got.data());
          EXPECT_EQ(std::memcmp(got.data(), host.data(), got.size() * 4), 0);
        }
        // Thread-local capture: the other rank's calls on this device go on.
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
        const Status captured = layer->enqueue({stream}, from, to);
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        if (graph != nullptr) (void)cudaGraphDestroy(graph);
        (void)cudaStreamDestroy(stream);
        expect_refusal(captured, StatusCode::kUnsupported, {"stream", "captured"});
        return status;
      })) {
    EXPECT_TRUE(s.ok()) << s.to_string();
  }
}

TEST(CudaRanks, ARefusalOrALostRankIsAnErrorOnAll) {
  REQUIRE_HOPPER();
  const test::LayerTensors tensors = test::make_tensors(46, test::deepseek_like());
  const auto make = test::maker_of(tensors);
  const auto status = test::on_two_ranks(
      [&](int rank, const std::shared_ptr<Communicator>& c) {
        const auto layer = make(two_engines(rank, c));
        if (!layer.ok()) return layer.status();
        const Tensor x = Tensor::zeros(DType::kBF16, {2, rank == 0 ? 64 : 32}).value();
        Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
        Status first = layer->forward(x.view(), y.view());
        if (rank == 1) return first;  // and never calls again
        expect_refusal(first, StatusCode::kInvalidArgument, {"forward", "rank 1 refused"});
        return layer->forward(x.view(), y.view());
      },
      2000);
  expect_refusal(status[1], StatusCode::kInvalidShape, {"hidden_states", "[2, 32]"});
  expect_refusal(status[0], StatusCode::kDevice, {"forward", "1"});
}

}  // namespace
}  // namespace moesaic
