// The experts of a GPU through the calls that the CPU's have: ids and weights of the caller, device
// views, a stream. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "experts/gpu_call.h"
#include "moesaic/device_tensor.h"
#include "moesaic/modular_kernel.h"
#include "support/cuda_device.h"
#include "support/experts_run.h"
#include "support/fp8_rows.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::GpuCall;
using test::kGpu;
using test::StandardCase;

double relative_to_cpu(GpuCall& call) {
  StandardCase c = test::make_case(5, test::small_problem(call.c.problem.quant.name.data()),
                                   call.c.hidden_states.shape()[0], DType::kBF16, 0.1);
  c.problem.num_local_experts = call.c.problem.num_local_experts;
  c.expert_map = call.c.expert_map;
  const Tensor want = test::run_standard(*test::make_backend("cpu_reference", c), c);
  const Tensor got = call.result();
  return test::compare(test::to_doubles(got.view()), test::to_doubles(want.view())).rel_l2;
}

TEST(DeviceExperts, TheSameCallsAsOnTheCpu) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block"}) {
    for (const std::int64_t local : {6, 4}) {
      GpuCall call(quant, 33, local);
      EXPECT_EQ(call.experts->reduction(), TopKWeightAndReduce::kNoOp);
      EXPECT_GT(call.experts->weight_bytes(), 0);
      const Status status = call.experts->run(call.args());
      ASSERT_TRUE(status.ok()) << status.to_string();
      EXPECT_LT(relative_to_cpu(call), 0x1p-7) << quant << ' ' << local;
      std::vector<RowNumerics> rows(33);
      ExpertsArgs measured = call.args();
      measured.numerics = rows;
      const Tensor before = call.result();
      ASSERT_TRUE(call.experts->run(measured).ok());
      const Tensor after = call.result();
      EXPECT_EQ(std::memcmp(before.data(), after.data(), static_cast<std::size_t>(after.bytes())),
                0);
    }
  }
}

// Rows that were quantised elsewhere: scales lie group by group, rows of a group side by side.
TEST(DeviceExperts, CodesHaveTheBitsOfTheRowsTheyWereMadeOf) {
  REQUIRE_HOPPER();
  EXPECT_FALSE(GpuCall("bf16", 1, 6).experts->takes_quantized_rows());
  for (const std::int64_t tokens : {1, 5, 33, 200}) {
    GpuCall call("fp8-block", tokens, 6);
    ASSERT_TRUE(call.experts->takes_quantized_rows());
    ASSERT_TRUE(call.experts->run(call.args()).ok());
    const Tensor want = call.result();
    const test::Fp8Rows rows = test::fp8_rows(call.c.hidden_states, quant::ScaleRounding::kNone);
    const std::int64_t groups = rows.scales.shape()[1], stride = tokens + 3;
    Tensor apart = Tensor::zeros(DType::kF32, {groups, stride}).value();
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t g = 0; g < groups; ++g) {
        apart.as<float>()[g * stride + t] = rows.scales.as<float>()[t * groups + g];
      }
    }
    const DeviceTensor codes = DeviceTensor::copy_of(rows.codes.view(), kGpu).value();
    const DeviceTensor scales = DeviceTensor::copy_of(apart.view(), kGpu).value();
    ExpertsArgs a = call.args();
    a.hidden_states = codes.view();
    a.hidden_scale = {scales.view().data, DType::kF32, {tokens, groups}, kGpu};
    a.hidden_scale.strides = {1, stride};
    ASSERT_EQ(cudaMemset(call.output.data(), 0xFF, static_cast<std::size_t>(call.output.bytes())),
              cudaSuccess);
    const Status status = call.experts->run(a);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const Tensor got = call.result();
    EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())), 0)
        << tokens;
  }
}

TEST(DeviceExperts, TheModularKernelRunsThem) {
  REQUIRE_HOPPER();
  GpuCall call("bf16", 9, 6);
  const auto source = make_stacked_source(call.c.weights.view());
  ASSERT_TRUE(call.experts->run(call.args()).ok());
  const Tensor want = call.result();
  ModularKernel::Options options;
  options.max_tokens = 9;
  const ModularKernel kernel =
      ModularKernel::create(call.c.problem, make_local_prepare_finalize(call.c.problem).value(),
                            std::move(call.experts), options)
          .value();
  ModularKernel::Args a;
  a.hidden_states = call.x.view();
  a.topk_ids = call.ids.view();
  a.topk_weights = call.weights.view();
  a.output = call.output.view();
  ASSERT_EQ(cudaMemset(call.output.data(), 0xFF, static_cast<std::size_t>(call.output.bytes())),
            cudaSuccess);
  const Status status = kernel.run(a);
  ASSERT_TRUE(status.ok()) << status.to_string();
  const Tensor got = call.result();
  EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())), 0);
  a.hidden_states.device = Device::cpu();
  expect_refusal(kernel.run(a), StatusCode::kInvalidArgument, {"hidden_states: got memory of cpu"});
}

// A rank without experts adds nothing, but whoever sums up reads what it wrote.
TEST(DeviceExperts, WithoutLocalExpertsTheOutputIsZero) {
  REQUIRE_HOPPER();
  for (const char* backend : {"cuda_sm90", "cuda_general"}) {
    GpuCall call(test::make_case(5, test::small_problem("bf16"), 5, DType::kBF16, 0.1), 0, backend);
    const Tensor got = call.run(call.args());
    for (std::int64_t i = 0; i < got.bytes() / 4; ++i) {
      ASSERT_EQ(got.as<float>()[i], 0.0F) << backend << " at " << i;
    }
  }
}

TEST(DeviceExperts, ACapturedCallReplaysWithOtherIds) {
  REQUIRE_HOPPER();
  GpuCall call("bf16", 4, 6);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ExpertsArgs a = call.args();
  a.stream = {stream};
  ASSERT_TRUE(call.experts->run(a).ok());
  ASSERT_TRUE(synchronize(kGpu, a.stream).ok());
  const Tensor first = call.result();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const Status captured = call.experts->run(a);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  // Other ids, replayed, then run as they are.
  Tensor ids = Tensor::zeros(DType::kI32, {4, 2}).value();
  for (std::int32_t i = 0; i < 8; ++i) ids.as<std::int32_t>()[i] = (5 * i + 1) % 6;
  ASSERT_TRUE(copy_tensor(ids.view(), call.ids.view()).ok());
  ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  ASSERT_TRUE(synchronize(kGpu, a.stream).ok());
  const Tensor replayed = call.result();
  ASSERT_TRUE(call.experts->run(a).ok());
  ASSERT_TRUE(synchronize(kGpu, a.stream).ok());
  const Tensor want = call.result();
  const auto bytes = static_cast<std::size_t>(want.bytes());
  EXPECT_EQ(std::memcmp(replayed.data(), want.data(), bytes), 0);
  EXPECT_NE(std::memcmp(replayed.data(), first.data(), bytes), 0);
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(DeviceExperts, MistakesAreRefusedBeforeALaunch) {
  REQUIRE_HOPPER();
  GpuCall call("bf16", 4, 6);
  ExpertsArgs a = call.args();
  a.hidden_states = call.c.hidden_states.view();
  expect_refusal(call.experts->run(a), StatusCode::kInvalidArgument,
                 {"hidden_states: got memory of cpu, need memory of cuda:0"});
  a = call.args();
  a.topk_ids = {call.c.routing.ids.data(), DType::kI32, {4, 2}, kGpu};
  expect_refusal(call.experts->run(a), StatusCode::kInvalidArgument, {"topk_ids", "host memory"});
  a = call.args();
  a.workspace = a.workspace.first(256);
  expect_refusal(call.experts->run(a), StatusCode::kWorkspaceTooSmall, {"workspace"});
  a = call.args();
  a.workspace = {a.output.data, a.workspace.size()};
  expect_refusal(call.experts->run(a), StatusCode::kAliasing, {"workspace overlaps output"});
  a = call.args();
  a.topk_weights.data = a.workspace.data();
  expect_refusal(call.experts->run(a), StatusCode::kAliasing, {"workspace overlaps topk_weights"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace moesaic
