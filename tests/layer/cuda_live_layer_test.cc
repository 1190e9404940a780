// What a layer on a GPU says of its experts, and what it refuses while it lives. Skipped, visibly,
// without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

// Some tens of milliseconds on a stream.
class LongWork {
 public:
  LongWork() { EXPECT_EQ(cudaMalloc(&big_, kBytes), cudaSuccess); }
  LongWork(const LongWork&) = delete;
  LongWork& operator=(const LongWork&) = delete;
  ~LongWork() { (void)cudaFree(big_); }
  void put_on(cudaStream_t stream) const {
    for (int i = 0; i < 200; ++i) {
      EXPECT_EQ(cudaMemsetAsync(big_, i, kBytes, stream), cudaSuccess);
    }
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;
  void* big_ = nullptr;
};

// A layer whose shared experts, the caller's, come when the routed ones have been launched, and fail
// where they are told to.
struct FailingLayer {
  bool fails = false;
  std::function<void(cudaStream_t)> before;
  MoeLayerSpec spec = test::small_spec();
  FusedMoE layer = test::make_layer(test::make_tensors(97, spec), options());

 private:
  FusedMoE::Options options() {
    FusedMoE::Options o = test::on_gpu(32);
    o.include_shared = false;
    o.on_device.shared_experts = [this](Stream stream, ConstTensorView, TensorView to) -> Status {
      auto* const on = static_cast<cudaStream_t>(stream.handle);
      if (before) before(on);
      if (fails) return {StatusCode::kOutOfMemory, "no room"};
      const auto bytes = static_cast<std::size_t>(to.dim(0) * to.dim(1)) * sizeof(float);
      return cudaMemsetAsync(to.data, 0, bytes, on) == cudaSuccess
                 ? Status()
                 : Status(StatusCode::kDevice, "memset");
    };
    return o;
  }
};

TEST(CudaLiveLayer, CopiedRowsAreTheExpertsToTheBit) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  for (const bool joins : {false, true}) {
    MoeLayerSpec spec = test::small_spec();
    // A shared expert like a routed one joins them, and is none of them here.
    if (joins) spec.shared.intermediate_size = spec.intermediate_size;
    const test::LayerTensors tensors = test::make_tensors(91, spec);
    test::LayerTensors other = test::make_tensors(91, spec);
    other.experts = test::make_tensors(92, spec).experts;
    const FusedMoE a = test::make_layer(tensors, test::on_gpu(32));
    const FusedMoE b = test::make_layer(other, test::on_gpu(32));
    const Tensor x = test::random_hidden(93, 17, spec.hidden_size);
    const test::LayerRun want = test::run_layer(a, x);
    std::string why;
    EXPECT_FALSE(test::same_bits(test::run_layer(b, x).output.view(), want.output.view(), &why));
    const auto from = a.get_expert_weights().value(), to = b.get_expert_weights().value();
    ASSERT_EQ(from.size(), to.size());
    ASSERT_FALSE(from.empty());
    for (std::size_t i = 0; i < from.size(); ++i) {
      EXPECT_EQ(from[i].rows.dim(0), spec.num_experts);
      EXPECT_EQ(from[i].rows.device, Device::cuda(0));
      ASSERT_EQ(from[i].rows.dim(1), to[i].rows.dim(1));
      ASSERT_EQ(cudaMemcpy(to[i].rows.data, from[i].rows.data,
                           static_cast<std::size_t>(from[i].rows.dim(0) * from[i].rows.dim(1)),
                           cudaMemcpyDeviceToDevice),
                cudaSuccess);
    }
    EXPECT_TRUE(test::same_bits(test::run_layer(b, x).output.view(), want.output.view(), &why))
        << why;
  }
}

// Scales of the hidden states that are alike let the gate or the router run what is in front of the
// experts; they may differ once the experts' rows are handed out.
TEST(CudaLiveLayer, HandedOutExpertsAreRoutedAsBefore) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  MoeLayerSpec spec = test::small_spec();
  spec.hidden_size = 256;
  spec.intermediate_size = 128;
  const test::LayerTensors tensors = test::make_tensors(95, spec);
  FusedMoE::Options options = test::on_gpu(32);
  options.quant = "nvfp4";
  for (const std::int64_t tokens : {1, 2, 12}) {
    const FusedMoE layer = test::make_layer(tensors, options);
    ASSERT_EQ(layer.experts_backend(), "cuda_sm90");
    const Tensor x = test::random_hidden(96, tokens, spec.hidden_size);
    const test::LayerRun want = test::run_layer(layer, x);
    // Its rows are what the workspace has then.
    (void)test::run_layer(layer, test::random_hidden(97, tokens, spec.hidden_size));
    ASSERT_TRUE(layer.get_expert_weights().ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(test::run_layer(layer, x).output.view(), want.output.view(), &why))
        << tokens << ' ' << why;
  }
}

// Host tensors travel on a stream of the layer's own choice: not before what enqueue left on another.
TEST(CudaLiveLayer, ForwardComesAfterWhatWasEnqueued) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  const MoeLayerSpec spec = test::small_spec();
  const test::LayerTensors tensors = test::make_tensors(97, spec);
  const FusedMoE layer = test::make_layer(tensors, test::on_gpu(32));
  const Tensor x = test::random_hidden(98, 17, spec.hidden_size);
  const test::LayerRun want = test::run_layer(layer, x);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const auto in = DeviceTensor::copy_of(x.view(), Device::cuda(0)).value();
  auto out = DeviceTensor::copy_of(want.output.view(), Device::cuda(0)).value();
  const LongWork work;
  work.put_on(stream);
  ASSERT_TRUE(layer.enqueue({stream}, in.view(), out.view()).ok());
  ASSERT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  std::string why;
  EXPECT_TRUE(test::same_bits(test::run_layer(layer, x).output.view(), want.output.view(), &why))
      << why;
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  (void)cudaStreamDestroy(stream);
}

// Nor before what it left there and then failed.
TEST(CudaLiveLayer, ForwardComesAfterAnEnqueueThatFailed) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  FailingLayer made;
  const Tensor x = test::random_hidden(98, 17, made.spec.hidden_size);
  const test::LayerRun want = test::run_layer(made.layer, x);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  const Tensor other = test::random_hidden(99, 17, made.spec.hidden_size);
  const auto in = DeviceTensor::copy_of(other.view(), Device::cuda(0)).value();
  auto out = DeviceTensor::copy_of(want.output.view(), Device::cuda(0)).value();
  const LongWork work;
  work.put_on(stream);
  made.fails = true;
  expect_refusal(made.layer.enqueue({stream}, in.view(), out.view()), StatusCode::kOutOfMemory,
                 {"no room"});
  made.fails = false;
  ASSERT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  std::string why;
  EXPECT_TRUE(
      test::same_bits(test::run_layer(made.layer, x).output.view(), want.output.view(), &why))
      << why;
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  (void)cudaStreamDestroy(stream);
}

// What forward has launched is over when it returns, also with an error: the next call may be one of a
// stream that waits for nobody.
TEST(CudaLiveLayer, AForwardThatFailedIsOver) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  FailingLayer made;
  const Tensor x = test::random_hidden(98, 17, made.spec.hidden_size);
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  const LongWork work;
  made.fails = true;
  made.before = [&](cudaStream_t stream) { work.put_on(stream); };
  expect_refusal(made.layer.forward(x.view(), y.view()), StatusCode::kOutOfMemory, {"no room"});
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaSuccess);
}

// NaN in weights is data, on either device.
TEST(CudaLiveLayer, NanInTheSharedGateIsData) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  MoeLayerSpec spec = test::small_spec();
  spec.shared.intermediate_size = 128;
  spec.shared.gated_output = true;
  test::LayerTensors tensors = test::make_tensors(99, spec);
  ASSERT_EQ(tensors.shared_gate_weight.dtype(), DType::kBF16);
  tensors.shared_gate_weight.as<std::uint16_t>()[3] = 0x7FC0;
  const FusedMoE layer = test::make_layer(tensors, test::on_gpu(32));
  const test::LayerRun run = test::run_layer(layer, test::random_hidden(100, 3, spec.hidden_size));
  for (std::int64_t i = 0; i < 3 * spec.hidden_size; ++i) {
    ASSERT_TRUE(std::isnan(load_as_f32(run.output.data(), run.output.dtype(), i))) << i;
  }
}

TEST(CudaLiveLayer, RefusesByName) {
  if (!check_device(Device::cuda(0)).ok())
    GTEST_SKIP() << check_device(Device::cuda(0)).to_string();
  const test::LayerTensors tensors = test::make_tensors(94, test::small_spec());
  FusedMoE layer = test::make_layer(tensors, test::on_gpu(8));
  EXPECT_EQ(layer.global_num_experts(), 8);
  EXPECT_EQ(layer.local_num_experts(), 8);
  EXPECT_TRUE(layer.expert_map().empty());
  EXPECT_EQ(layer.parallel().ep_size, 1);
  const auto all = make_stacked_source(tensors.experts.view());
  expect_refusal(layer.update_expert_map({}, *all), StatusCode::kUnsupported,
                 {"update_expert_map: got a layer on cuda:0", "a new layer of the new world"});
  expect_refusal(layer.set_eplb_state({}), StatusCode::kUnsupported, {"enable_eplb: got false"});
  FusedMoE::Options balanced = test::on_gpu(8);
  balanced.ranks.enable_eplb = true;
  expect_refusal(FusedMoE::create(tensors.weights(), balanced).status(), StatusCode::kUnsupported,
                 {"enable_eplb: got true on a GPU"});
}

}  // namespace
}  // namespace moesaic
