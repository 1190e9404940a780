// Calls of enqueue with more rows than the workspace is for: several steps behind each other, with
// the bits of a layer that takes them at once. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/fused_moe.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/random.h"
#include "support/random_experts.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_same;
using test::LayerTensors;
using test::on_gpu;

constexpr Device kLongGpu = Device::cuda(0);
constexpr std::int64_t kLongRows = 37;

DeviceTensor copied_to_gpu(const Tensor& t) {
  return DeviceTensor::copy_of(t.view(), kLongGpu).value();
}
DeviceTensor space_on_gpu(DType dtype, const Shape& shape) {
  return DeviceTensor::uninitialized(kLongGpu, dtype, shape).value();
}
Tensor fetched_from_gpu(const DeviceTensor& t) {
  Tensor host = Tensor::zeros(t.view().dtype, t.view().shape).value();
  EXPECT_TRUE(copy_tensor(t.view(), host.view()).ok());
  return host;
}

// What the caller brings, and what comes back.
enum class Routing { kOwn, kLogits, kIds };
struct LongCall {
  Routing routing = Routing::kOwn;
  bool apart = false, padded = false;
  DType out = DType::kBF16;
};
struct LongResult {
  Tensor output, shared, logits, weights, ids;
};

LongResult run_long(const FusedMoE& layer, const LongCall& call, const Tensor& x,
                    const Tensor& logits, const Tensor& weights, const Tensor& ids,
                    const Tensor& padding) {
  const std::int64_t hidden = x.shape()[1], k = ids.shape()[1];
  const DeviceTensor in = copied_to_gpu(x), given_logits = copied_to_gpu(logits),
                     given_weights = copied_to_gpu(weights), given_ids = copied_to_gpu(ids),
                     mask = copied_to_gpu(padding);
  DeviceTensor out = space_on_gpu(call.out, {kLongRows, hidden});
  DeviceTensor shared = space_on_gpu(DType::kF32, {kLongRows, hidden});
  DeviceTensor own_logits = space_on_gpu(DType::kF32, logits.shape());
  DeviceTensor own_weights = space_on_gpu(DType::kF32, {kLongRows, k});
  DeviceTensor own_ids = space_on_gpu(DType::kI32, {kLongRows, k});
  FusedMoE::Args a;
  a.hidden_states = in.view();
  a.output = out.view();
  if (call.routing == Routing::kLogits) a.router_logits = given_logits.view();
  if (call.routing == Routing::kIds) {
    a.topk_weights = given_weights.view();
    a.topk_ids = given_ids.view();
  } else {
    a.trace.router_logits = own_logits.view();
  }
  if (call.apart) a.shared_output = shared.view();
  if (call.padded) a.padding_mask = mask.view();
  a.trace.topk_weights = own_weights.view();
  a.trace.topk_ids = own_ids.view();
  const Status status = layer.enqueue({}, a);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(synchronize(kLongGpu).ok());
  LongResult r;
  r.output = fetched_from_gpu(out);
  r.weights = fetched_from_gpu(own_weights);
  r.ids = fetched_from_gpu(own_ids);
  if (call.apart) r.shared = fetched_from_gpu(shared);
  if (call.routing != Routing::kIds) r.logits = fetched_from_gpu(own_logits);
  return r;
}

TEST(CudaLongCalls, HaveTheBitsOfOneStepWhateverTheCallerBrings) {
  REQUIRE_HOPPER();
  const LayerTensors t = test::make_tensors(71, test::deepseek_like());
  const std::int64_t hidden = t.spec.hidden_size, k = t.spec.routing.top_k;
  const Tensor x = test::random_hidden(72, kLongRows, hidden);
  test::Rng rng(73);
  const Tensor logits = test::random_normal(rng, DType::kF32, {kLongRows, t.spec.num_experts});
  const test::OwnedRouting given = test::random_routing(74, kLongRows, t.spec.num_experts, k);
  Tensor padding = Tensor::zeros(DType::kU8, {kLongRows}).value();
  for (const std::int64_t row : {3, 17, 36}) padding.as<std::uint8_t>()[row] = 1;
  const FusedMoE whole = test::make_layer(t, on_gpu(kLongRows));
  for (const std::int64_t max_tokens : {1, 5, 16, 36}) {
    const FusedMoE layer = test::make_layer(t, on_gpu(max_tokens));
    for (const Routing routing : {Routing::kOwn, Routing::kLogits, Routing::kIds}) {
      for (const bool apart : {false, true}) {
        for (const bool padded : {false, true}) {
          const LongCall call = {routing, apart, padded, apart ? DType::kF32 : DType::kBF16};
          const LongResult got =
              run_long(layer, call, x, logits, given.weights, given.ids, padding);
          const LongResult want =
              run_long(whole, call, x, logits, given.weights, given.ids, padding);
          const std::string name = std::to_string(max_tokens) + " " +
                                   std::to_string(static_cast<int>(routing)) +
                                   (apart ? " apart" : "") + (padded ? " padded" : "");
          expect_same(got.output, want.output, name + " output");
          expect_same(got.weights, want.weights, name + " weights");
          expect_same(got.ids, want.ids, name + " ids");
          if (apart) expect_same(got.shared, want.shared, name + " shared");
          if (got.logits.present()) expect_same(got.logits, want.logits, name + " logits");
        }
      }
    }
  }
}

// Rows apart, [B, T, H], in place and in a graph.
TEST(CudaLongCalls, OfEveryLayoutAndInAGraph) {
  REQUIRE_HOPPER();
  const LayerTensors t = test::make_tensors(75, test::small_spec());
  const std::int64_t hidden = t.spec.hidden_size;
  FusedMoE::Options options = on_gpu(8);
  options.inplace = true;
  const FusedMoE layer = test::make_layer(t, options);
  const Tensor x = test::random_hidden(76, kLongRows, hidden);
  const Tensor want = test::run_layer(test::make_layer(t, on_gpu(64)), x, DType::kBF16).output;

  Tensor wide = Tensor::zeros(DType::kBF16, {kLongRows, hidden + 8}).value();
  for (std::int64_t r = 0; r < kLongRows; ++r) {
    std::memcpy(wide.data() + r * (hidden + 8) * 2, x.data() + r * hidden * 2,
                static_cast<std::size_t>(hidden) * 2);
  }
  const DeviceTensor apart = copied_to_gpu(wide);
  ConstTensorView rows = apart.view();
  rows.shape = Shape{kLongRows, hidden};
  DeviceTensor out = space_on_gpu(DType::kBF16, {kLongRows, hidden});
  ASSERT_TRUE(layer.enqueue({}, rows, out.view()).ok());
  expect_same(fetched_from_gpu(out), want, "rows apart");

  DeviceTensor same = copied_to_gpu(x);
  ASSERT_TRUE(layer.enqueue({}, same.view(), same.view()).ok());
  expect_same(fetched_from_gpu(same), want, "in place");

  const DeviceTensor in = copied_to_gpu(x);
  ConstTensorView cube = in.view();
  cube.shape = Shape{1, kLongRows, hidden};
  cube.strides = {kLongRows * hidden, hidden, 1};
  TensorView cube_out = out.view();
  cube_out.shape = cube.shape;
  cube_out.strides = cube.strides;
  ASSERT_EQ(cudaMemset(out.data(), 0xFF, static_cast<std::size_t>(out.bytes())), cudaSuccess);
  ASSERT_TRUE(layer.enqueue({}, cube, cube_out).ok());
  expect_same(fetched_from_gpu(out), want, "[B, T, H]");

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const Status captured = layer.enqueue({stream}, in.view(), out.view());
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(captured.ok()) << captured.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaMemset(out.data(), 0xFF, static_cast<std::size_t>(out.bytes())), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expect_same(fetched_from_gpu(out), want, "a graph");
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

// Steps begin on 16 bytes: rows of 77 elements go by eights, and fewer than eight are refused.
TEST(CudaLongCalls, OfRowsThatAreNoWholeSixteenBytes) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = test::small_spec();
  spec.hidden_size = 77;
  spec.intermediate_size = 51;
  const LayerTensors t = test::make_tensors(77, spec);
  const Tensor x = test::random_hidden(78, kLongRows, 77);
  const DeviceTensor in = copied_to_gpu(x);
  DeviceTensor out = space_on_gpu(DType::kBF16, {kLongRows, 77});
  const Tensor want = test::run_layer(test::make_layer(t, on_gpu(64)), x, DType::kBF16).output;
  const FusedMoE layer = test::make_layer(t, on_gpu(13));
  const Status status = layer.enqueue({}, in.view(), out.view());
  ASSERT_TRUE(status.ok()) << status.to_string();
  expect_same(fetched_from_gpu(out), want, "eights");
  test::expect_refusal(test::make_layer(t, on_gpu(7)).enqueue({}, in.view(), out.view()),
                       StatusCode::kLimitExceeded, {"tokens: got 37", "max_tokens = 7", "77"});
}

}  // namespace
}  // namespace moesaic
