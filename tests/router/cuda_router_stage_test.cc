// Router on a GPU through its public calls: every dtype of logits and ids, zero experts with a
// workspace of the caller's, functions that route, graphs, mistakes. Bits against the CPU's router.
// Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "moesaic/device_tensor.h"
#include "router/router_fixture.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::expect_same;

constexpr Device kStageGpu = Device::cuda(0);

DeviceTensor room(DType dtype, const Shape& shape) {
  DeviceTensor t = DeviceTensor::uninitialized(kStageGpu, dtype, shape).value();
  EXPECT_EQ(cudaMemset(t.data(), 0xFF, static_cast<std::size_t>(t.bytes())), cudaSuccess);
  return t;
}
DeviceTensor on_gpu(const Tensor& t) { return DeviceTensor::copy_of(t.view(), kStageGpu).value(); }
Tensor on_host(const DeviceTensor& t) {
  Tensor host = Tensor::zeros(t.view().dtype, t.view().shape).value();
  EXPECT_TRUE(copy_tensor(t.view(), host.view()).ok());
  return host;
}

// Rows with ties, NaN and infinities among ordinary ones.
Tensor logits_with_oddities(std::uint64_t seed, DType dtype, std::int64_t rows,
                            std::int64_t columns) {
  test::Rng rng(seed);
  Tensor t = test::random_normal(rng, dtype, {rows, columns}, 2.0);
  const auto put = [&](std::int64_t i, float v) {
    if (dtype == DType::kF32) {
      t.as<float>()[i] = v;
    } else {
      // NaN, infinity and 1 have short codes.
      const std::uint16_t nan = dtype == DType::kBF16 ? 0x7FC0 : 0x7E00;
      const std::uint16_t inf = dtype == DType::kBF16 ? 0x7F80 : 0x7C00;
      const std::uint16_t one = dtype == DType::kBF16 ? 0x3F80 : 0x3C00;
      t.as<std::uint16_t>()[i] = std::isnan(v) ? nan : std::isinf(v) ? inf : one;
    }
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t at = r * columns + r % columns;
    if (r % 5 == 1) put(at, std::numeric_limits<float>::quiet_NaN());
    if (r % 5 == 2) put(at, std::numeric_limits<float>::infinity());
    if (r % 5 == 3) {
      for (std::int64_t c = 0; c < columns; ++c) put(r * columns + c, 1.0F);
    }
    if (r % 5 == 4) {
      for (std::int64_t c = 0; c < columns; ++c) {
        put(r * columns + c, std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
  return t;
}

struct Outputs {
  Tensor weights, ids, zero;
};

Outputs run_host(const Router& router, Router::Args args, DType ids_dtype, std::int64_t hidden) {
  const std::int64_t rows = args.router_logits.dim(0);
  Outputs o;
  o.weights = Tensor::zeros(DType::kF32, {rows, router.slots()}).value();
  o.ids = Tensor::zeros(ids_dtype, {rows, router.slots()}).value();
  args.topk_weights = o.weights.view();
  args.topk_ids = o.ids.view();
  if (hidden > 0) {
    o.zero = Tensor::zeros(args.hidden_states.dtype, {rows, hidden}).value();
    args.zero_expert_output = o.zero.view();
  }
  const Status status = router.select_experts(args);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return o;
}

// The same on the device; `args` are host views.
Outputs run_device(const Router& router, const Router::Args& args, DType ids_dtype,
                   std::int64_t hidden) {
  const std::int64_t rows = args.router_logits.dim(0);
  const auto copy = [](const ConstTensorView& t) {
    return t.present() ? std::optional(DeviceTensor::copy_of(t, kStageGpu).value()) : std::nullopt;
  };
  const auto logits = copy(args.router_logits), x = copy(args.hidden_states),
             mask = copy(args.padding_mask);
  DeviceTensor weights = room(DType::kF32, {rows, router.slots()});
  DeviceTensor ids = room(ids_dtype, {rows, router.slots()});
  std::optional<DeviceTensor> zero;
  const DeviceTensor workspace = room(DType::kU8, {router.workspace_size(rows).value() + 1});
  Router::Args a;
  a.router_logits = logits->view();
  if (x) a.hidden_states = x->view();
  if (mask) a.padding_mask = mask->view();
  a.topk_weights = weights.view();
  a.topk_ids = ids.view();
  a.workspace = workspace.span();
  if (hidden > 0) {
    zero.emplace(room(args.hidden_states.dtype, {rows, hidden}));
    a.zero_expert_output = zero->view();
  }
  const Status status = router.enqueue({}, a);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(synchronize(kStageGpu).ok());
  Outputs o;
  o.weights = on_host(weights);
  o.ids = on_host(ids);
  if (zero) o.zero = on_host(*zero);
  return o;
}

TEST(CudaRouterStage, LogitsAndIdsOfEveryDTypeHaveTheBitsOfTheCpu) {
  REQUIRE_HOPPER();
  for (const std::int64_t experts : {8, 130, 512}) {
    Router::Options options;
    options.spec = test::topk_spec(ScoringFunc::kSoftmax, experts, 4, true);
    const Router cpu = Router::create(options).value();
    options.device = kStageGpu;
    const Router gpu = Router::create(options).value();
    EXPECT_EQ(gpu.workspace_size(100).value(), 0);
    for (const std::int64_t rows : {1, 23, 700}) {
      Tensor mask = Tensor::zeros(DType::kU8, {rows}).value();
      if (rows > 1) mask.as<std::uint8_t>()[1] = 1;
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        const Tensor logits = logits_with_oddities(7, dtype, rows, experts);
        for (const DType ids : {DType::kI32, DType::kI64, DType::kU32}) {
          Router::Args args;
          args.router_logits = logits.view();
          if (ids != DType::kU32) args.padding_mask = mask.view();
          const std::string what = std::to_string(experts) + " " + std::to_string(rows) + " " +
                                   std::string(dtype_name(dtype)) + " " +
                                   std::string(dtype_name(ids));
          const Outputs want = run_host(cpu, args, ids, 0), got = run_device(gpu, args, ids, 0);
          expect_same(got.weights, want.weights, what + " weights");
          expect_same(got.ids, want.ids, what + " ids");
        }
      }
    }
  }
}

TEST(CudaRouterStage, ZeroExpertsNeedTheCallersWorkspace) {
  REQUIRE_HOPPER();
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kZeroExpert, 10, 3);
  options.spec.num_zero_experts = 4;
  options.spec.has_correction_bias = true;
  test::Rng rng(8);
  const Tensor bias = test::random_normal(rng, DType::kF32, {14}, 0.1);
  options.correction_bias = bias.view();
  const Router cpu = Router::create(options).value();
  options.device = kStageGpu;
  const Router gpu = Router::create(options).value();
  EXPECT_EQ(gpu.workspace_size(37).value(), 37 * 4);
  Tensor mask = Tensor::zeros(DType::kU8, {37}).value();
  mask.as<std::uint8_t>()[5] = 9;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor logits = test::random_normal(rng, dtype, {37, 14}, 2.0);
    const Tensor x = test::random_normal(rng, dtype, {37, 40});
    Router::Args args;
    args.router_logits = logits.view();
    args.hidden_states = x.view();
    args.padding_mask = mask.view();
    const Outputs want = run_host(cpu, args, DType::kI32, 40);
    const Outputs got = run_device(gpu, args, DType::kI32, 40);
    expect_same(got.weights, want.weights, "weights");
    expect_same(got.ids, want.ids, "ids");
    expect_same(got.zero, want.zero, "zero experts");
  }
  const DeviceTensor logits = room(DType::kF32, {2, 14}), x = room(DType::kF32, {2, 8});
  DeviceTensor w = room(DType::kF32, {2, 3}), ids = room(DType::kI32, {2, 3}),
               zero = room(DType::kF32, {2, 8});
  Router::Args a;
  a.router_logits = logits.view();
  a.hidden_states = x.view();
  a.topk_weights = w.view();
  a.topk_ids = ids.view();
  a.zero_expert_output = zero.view();
  expect_refusal(gpu.enqueue({}, a), StatusCode::kWorkspaceTooSmall, {"workspace", "need 8"});
  a.workspace = zero.span();
  expect_refusal(gpu.enqueue({}, a), StatusCode::kAliasing, {"zero_expert_output", "workspace"});
}

// A function whose work is that of another router: the bits of that router.
TEST(CudaRouterStage, AFunctionOfTheCallersRoutes) {
  REQUIRE_HOPPER();
  Router::Options options;
  options.spec = test::topk_spec(ScoringFunc::kSigmoid, 16, 3, true);
  options.device = kStageGpu;
  const Router plain = Router::create(options).value();
  Router::Options custom_options;
  custom_options.spec = test::method_spec(RoutingMethod::kCustom, 16, 3);
  custom_options.device = kStageGpu;
  expect_refusal(Router::create(custom_options).status(), StatusCode::kInvalidArgument,
                 {"custom_on_device: absent"});
  int calls = 0;
  custom_options.custom_on_device = [&](Stream stream, ConstTensorView x, ConstTensorView logits,
                                        bool, TensorView weights, TensorView ids) {
    ++calls;
    EXPECT_EQ(x.dim(1), 8);
    Router::Args a;
    a.router_logits = logits;
    a.topk_weights = weights;
    a.topk_ids = ids;
    return plain.enqueue(stream, a);
  };
  const Router custom = Router::create(custom_options).value();
  EXPECT_EQ(custom.name(), "custom");
  test::Rng rng(9);
  const Tensor x = test::random_normal(rng, DType::kBF16, {29, 8});
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor logits = test::random_normal(rng, dtype, {29, 16}, 2.0);
    Router::Args args;
    args.router_logits = logits.view();
    const Outputs want = run_device(plain, args, DType::kI32, 0);
    args.hidden_states = x.view();
    const Outputs got = run_device(custom, args, DType::kI32, 0);
    expect_same(got.weights, want.weights, "weights");
    expect_same(got.ids, want.ids, "ids");
  }
  EXPECT_EQ(calls, 2);
  custom_options.num_fused_shared_experts = 1;
  expect_refusal(Router::create(custom_options).status(), StatusCode::kUnsupported,
                 {"num_fused_shared_experts", "custom"});
  custom_options.num_fused_shared_experts = 0;
  custom_options.device = Device::cpu();
  expect_refusal(Router::create(custom_options).status(), StatusCode::kUnsupported,
                 {"custom_on_device", "cpu"});
}

TEST(CudaRouterStage, WhatAFunctionNamesAndNobodyHasIsAnEmptySlot) {
  REQUIRE_HOPPER();
  const std::int32_t wild[8] = {0, 7, -1, 8, -2, 5, INT32_MAX, INT32_MIN};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float some[8] = {1, 2, nan, 4, nan, 6, 7, nan};
  const test::DeviceBytes ids(wild, sizeof(wild)), weights(some, sizeof(some));
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kCustom, 8, 2);
  options.device = kStageGpu;
  options.custom_on_device = [&](Stream stream, ConstTensorView, ConstTensorView, bool,
                                 TensorView to_weights, TensorView to_ids) {
    auto* const s = static_cast<cudaStream_t>(stream.handle);
    EXPECT_EQ(cudaMemcpyAsync(to_ids.data, ids.as(), 32, cudaMemcpyDeviceToDevice, s), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(to_weights.data, weights.as(), 32, cudaMemcpyDeviceToDevice, s),
              cudaSuccess);
    return Status();
  };
  const Router router = Router::create(options).value();
  const Tensor logits = Tensor::zeros(DType::kF32, {4, 8}).value();
  Tensor mask = Tensor::zeros(DType::kU8, {4}).value();
  mask.as<std::uint8_t>()[0] = 1;
  Router::Args args;
  args.router_logits = logits.view();
  args.padding_mask = mask.view();
  const Outputs got = run_device(router, args, DType::kI32, 0);
  const std::int32_t want_ids[8] = {-1, -1, -1, -1, -1, 5, -1, -1};
  const float want_weights[8] = {0, 0, 0, 0, 0, 6, 0, 0};
  EXPECT_EQ(std::memcmp(got.ids.data(), want_ids, 32), 0);
  EXPECT_EQ(std::memcmp(got.weights.data(), want_weights, 32), 0);
}

TEST(CudaRouterStage, AFailureOfTheFunctionIsTheCalls) {
  REQUIRE_HOPPER();
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kCustom, 8, 2);
  options.device = kStageGpu;
  bool throws = false;
  options.custom_on_device = [&](Stream, ConstTensorView, ConstTensorView, bool, TensorView,
                                 TensorView) -> Status {
    if (throws) throw std::runtime_error("no room");
    return {StatusCode::kDevice, "lost"};
  };
  const Router router = Router::create(options).value();
  const DeviceTensor logits = room(DType::kF32, {4, 8});
  DeviceTensor w = room(DType::kF32, {4, 2}), ids = room(DType::kI32, {4, 2});
  Router::Args a;
  a.router_logits = logits.view();
  a.topk_weights = w.view();
  a.topk_ids = ids.view();
  expect_refusal(router.enqueue({}, a), StatusCode::kDevice, {"custom routing function", "lost"});
  throws = true;
  expect_refusal(router.enqueue({}, a), StatusCode::kInvalidArgument, {"threw", "no room"});
}

TEST(CudaRouterStage, ACapturedCallRoutesAnew) {
  REQUIRE_HOPPER();
  Router::Options options;
  options.spec = test::grouped_spec(ScoringFunc::kSigmoid, 32, 4, true, 4, 2);
  options.device = kStageGpu;
  const Router router = Router::create(options).value();
  test::Rng rng(10);
  DeviceTensor logits = on_gpu(test::random_normal(rng, DType::kBF16, {6, 32}, 2.0));
  DeviceTensor w = room(DType::kF32, {6, 4}), ids = room(DType::kI64, {6, 4});
  Router::Args a;
  a.router_logits = logits.view();
  a.topk_weights = w.view();
  a.topk_ids = ids.view();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const Status captured = router.enqueue({stream}, a);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 3; ++replay) {
    const Tensor fresh = test::random_normal(rng, DType::kBF16, {6, 32}, 2.0);
    ASSERT_TRUE(copy_tensor(fresh.view(), logits.view()).ok());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const Tensor replayed = on_host(ids);
    Router::Args host;
    host.router_logits = fresh.view();
    expect_same(replayed, run_device(router, host, DType::kI64, 0).ids, "replay");
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(CudaRouterStage, EveryMistakeIsAStatusAndLeavesNoError) {
  REQUIRE_HOPPER();
  Router::Options options;
  options.spec = test::topk_spec(ScoringFunc::kSoftmax, 8, 2, true);
  const Router cpu = Router::create(options).value();
  options.device = kStageGpu;
  const Router router = Router::create(options).value();
  const Tensor host = Tensor::zeros(DType::kF32, {4, 8}).value();
  const DeviceTensor logits = room(DType::kF32, {4, 8});
  DeviceTensor w = room(DType::kF32, {4, 2}), ids = room(DType::kI64, {4, 2});
  Router::Args good;
  good.router_logits = logits.view();
  good.topk_weights = w.view();
  good.topk_ids = ids.view();
  ASSERT_TRUE(router.enqueue({}, good).ok());
  const auto refused = [&](auto&& change, StatusCode code,
                           std::initializer_list<const char*> words) {
    Router::Args a = good;
    change(a);
    expect_refusal(router.enqueue({}, a), code, words);
  };
  using Args = Router::Args;
  refused([&](Args& a) { a.router_logits = host.view(); }, StatusCode::kInvalidArgument,
          {"router_logits: got memory of cpu"});
  refused(
      [&](Args& a) {
        a.router_logits = host.view();
        a.router_logits.device = kStageGpu;
      },
      StatusCode::kInvalidArgument, {"router_logits", "host memory"});
  refused([&](Args& a) { a.router_logits.dtype = DType::kI32; }, StatusCode::kInvalidDType,
          {"router_logits", "F32, BF16 or F16"});
  refused([&](Args& a) { a.topk_ids.dtype = DType::kU8; }, StatusCode::kInvalidDType,
          {"topk_ids: got U8", "I32, I64 or U32"});
  refused([&](Args& a) { a.topk_ids.data += 4; }, StatusCode::kInvalidLayout, {"topk_ids", "8"});
  refused(
      [&](Args& a) {
        a.topk_weights.shape = {4, 3};
      },
      StatusCode::kInvalidShape, {"topk_weights", "[4, 2]"});
  refused([&](Args& a) { a.topk_weights.data = const_cast<std::byte*>(logits.view().data); },
          StatusCode::kAliasing, {"topk_weights", "router_logits"});
  const EplbState eplb;
  refused([&](Args& a) { a.eplb = &eplb; }, StatusCode::kUnsupported, {"eplb", "GPU"});
  expect_refusal(cpu.enqueue({}, good), StatusCode::kUnsupported, {"enqueue", "CPU"});
  expect_refusal(router.workspace_size(-1).status(), StatusCode::kInvalidArgument, {"tokens"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace moesaic
