// A layer on device tensors: streams, graphs, traces, and what it refuses. Skipped, visibly,
// without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "layer/layer_case.h"
#include "moesaic/fused_moe.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::deepseek_like;
using test::DeviceBytes;
using test::expect_refusal;
using test::Feature;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::on_gpu;
using test::random_hidden;
using test::run_layer;
using test::scaled_output;
using test::small_spec;
using test::to_doubles;

constexpr Device kGpu = Device::cuda(0);

ConstTensorView input(const DeviceBytes& d, std::int64_t rows, std::int64_t hidden) {
  return {d.as<const std::byte>(), DType::kBF16, {rows, hidden}, kGpu};
}
TensorView output(const DeviceBytes& d, std::int64_t rows, std::int64_t hidden,
                  DType dtype = DType::kBF16) {
  return {d.as<std::byte>(), dtype, {rows, hidden}, kGpu};
}

// A stream and an instantiated graph, freed at the end.
struct Graph {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  Graph() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
  }
  void capture(const std::function<Status()>& work) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Status status = work();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  }
};

// Each replay routes other tokens; every result is compared on the device's own bits.
TEST(CudaLayerGraph, TenThousandReplaysWithChangingRouting) {
  REQUIRE_HOPPER();
  constexpr int kReplays = 10000, kInputs = 16;
  constexpr std::int64_t kTokens = 8;
  for (const Feature& f :
       {Feature{"deepseek", deepseek_like}, Feature{"scaled output", scaled_output}}) {
    const LayerTensors t = make_tensors(11, f.spec());
    const FusedMoE layer = make_layer(t, on_gpu(kTokens));
    const std::int64_t hidden = t.spec.hidden_size, bytes = kTokens * hidden * 2;
    const Tensor pool = random_hidden(12, kInputs * kTokens, hidden);
    const DeviceBytes inputs(pool.data(), pool.bytes());
    const DeviceBytes want(kInputs * bytes), all(kInputs * bytes), x(bytes), y(bytes);
    for (int i = 0; i < kInputs; ++i) {  // one call each, the plain way
      const ConstTensorView in(inputs.as<const std::byte>() + i * bytes, DType::kBF16,
                               {kTokens, hidden}, kGpu);
      const TensorView out(want.as<std::byte>() + i * bytes, DType::kBF16, {kTokens, hidden}, kGpu);
      const Status status = layer.enqueue({}, in, out);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Graph g;
    g.capture([&] {
      return layer.enqueue({g.stream}, input(x, kTokens, hidden), output(y, kTokens, hidden));
    });
    for (int replay = 0; replay < kReplays; ++replay) {
      const int i = (replay * 7) % kInputs;
      ASSERT_EQ(
          cudaMemcpyAsync(x.as(), inputs.as<std::byte>() + i * bytes,
                          static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, g.stream),
          cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(g.exec, g.stream), cudaSuccess);
      ASSERT_EQ(
          cudaMemcpyAsync(all.as<std::byte>() + i * bytes, y.as(), static_cast<std::size_t>(bytes),
                          cudaMemcpyDeviceToDevice, g.stream),
          cudaSuccess);
      if ((replay + 1) % 500 != 0) continue;
      ASSERT_EQ(cudaStreamSynchronize(g.stream), cudaSuccess);
      ASSERT_EQ(all.values<std::uint16_t>(), want.values<std::uint16_t>()) << "replay " << replay;
    }
  }
}

TEST(CudaLayer, TracesAreWhatTheHostPathReports) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(13, deepseek_like());
  const FusedMoE layer = make_layer(t, on_gpu(64));
  const std::int64_t hidden = t.spec.hidden_size, k = t.spec.routing.top_k;
  const Tensor x = random_hidden(14, 21, hidden);
  const LayerRun want = run_layer(layer, x);
  const DeviceBytes dx(x.data(), x.bytes()), y(21 * hidden * 4);
  const DeviceBytes logits(21 * 8 * 4), weights(21 * k * 4), ids(21 * k * 4);
  FusedMoE::Trace trace;
  trace.router_logits = {logits.as<std::byte>(), DType::kF32, {21, 8}, kGpu};
  trace.topk_weights = {weights.as<std::byte>(), DType::kF32, {21, k}, kGpu};
  trace.topk_ids = {ids.as<std::byte>(), DType::kI32, {21, k}, kGpu};
  ASSERT_TRUE(
      layer.enqueue({}, input(dx, 21, hidden), output(y, 21, hidden, DType::kF32), trace).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto equal = [](const DeviceBytes& d, const Tensor& host) {
    const auto bytes = d.values<std::byte>();
    return bytes.size() == static_cast<std::size_t>(host.bytes()) &&
           std::memcmp(bytes.data(), host.data(), bytes.size()) == 0;
  };
  EXPECT_TRUE(equal(logits, want.logits));
  EXPECT_TRUE(equal(weights, want.topk_weights));
  EXPECT_TRUE(equal(ids, want.topk_ids));
  EXPECT_TRUE(equal(y, want.output));
  EXPECT_TRUE(y.margin_is_intact() && ids.margin_is_intact());
}

// --- Misuse --------------------------------------------------------------------------------------

TEST(CudaLayerMisuse, EveryMistakeIsAStatusAndLeavesNoError) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(15, small_spec());
  const FusedMoE layer = make_layer(t, on_gpu(16));
  const std::int64_t hidden = t.spec.hidden_size;
  DeviceBytes x(16 * hidden * 2 + 64);
  const DeviceBytes y(16 * hidden * 4);
  const auto call = [&](ConstTensorView in, TensorView out, FusedMoE::Trace trace = {}) {
    return layer.enqueue({}, in, out, trace);
  };
  const ConstTensorView in = input(x, 16, hidden);
  const TensorView out = output(y, 16, hidden);
  EXPECT_TRUE(call(input(x, 0, hidden), output(y, 0, hidden)).ok()) << "no tokens";

  ConstTensorView shifted = in;
  shifted.data += 2;
  expect_refusal(call(shifted, out), StatusCode::kInvalidLayout, {"hidden_states", "16"});
  TensorView shifted_out = out;
  shifted_out.data += 8;
  expect_refusal(call(in, shifted_out), StatusCode::kInvalidLayout, {"output", "16"});
  ConstTensorView strided = input(x, 4, hidden);
  strided.strides[0] = hidden - 2;
  expect_refusal(call(strided, output(y, 4, hidden)), StatusCode::kInvalidLayout,
                 {"hidden_states: got strides"});
  const Tensor on_host = random_hidden(16, 16, hidden);
  expect_refusal(call(on_host.view(), out), StatusCode::kInvalidArgument,
                 {"hidden_states: got memory of cpu, need memory of cuda:0"});
  ConstTensorView lying = on_host.view();
  lying.device = kGpu;
  expect_refusal(call(lying, out), StatusCode::kInvalidArgument, {"hidden_states", "host memory"});
  ConstTensorView null = in;
  null.data = nullptr;
  expect_refusal(call(null, out), StatusCode::kInvalidArgument, {"hidden_states", "null"});
  const DeviceBytes large(17 * hidden * 4);
  const DeviceBytes long_output(17 * hidden * 4);
  EXPECT_TRUE(call(input(large, 17, hidden), output(long_output, 17, hidden)).ok())
      << "more rows than max_tokens: two steps";
  expect_refusal(call(input(x, 16, hidden / 2), out), StatusCode::kInvalidShape, {"hidden_states"});
  expect_refusal(call({x.as<const std::byte>(), DType::kF16, {16, hidden}, kGpu}, out),
                 StatusCode::kInvalidDType, {"BF16"});
  expect_refusal(call(in, output(y, 16, hidden, DType::kF16)), StatusCode::kInvalidDType,
                 {"output"});
  expect_refusal(call(in, {x.as<std::byte>(), DType::kBF16, {16, hidden}, kGpu}),
                 StatusCode::kAliasing, {"output", "hidden_states"});
  FusedMoE::Trace trace;
  trace.topk_ids = {y.as<std::byte>(), DType::kI32, {16, 3}, kGpu};
  expect_refusal(call(in, out, trace), StatusCode::kInvalidShape, {"topk_ids"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  x.poison();
  EXPECT_TRUE(call(in, out).ok()) << "a proper call after all that";
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(CudaLayerMisuse, OutOfMemoryIsAStatusAndPasses) {
  REQUIRE_HOPPER();
  const LayerTensors t = make_tensors(17, small_spec());
  const auto huge = FusedMoE::create(t.weights(), on_gpu(std::int64_t{1} << 29));
  ASSERT_FALSE(huge.ok());
  expect_refusal(huge.status(), StatusCode::kOutOfMemory, {"workspace", "bytes"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const Tensor x = random_hidden(18, 5, t.spec.hidden_size);
  const LayerRun run = run_layer(make_layer(t, on_gpu(16)), x);
  EXPECT_GT(compare(to_doubles(run.output.view()), to_doubles(run.output.view())).cosine, 0.9);
}

}  // namespace
}  // namespace moesaic
