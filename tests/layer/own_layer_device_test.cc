// A layer put together from the stages' public calls on a GPU: gate, router, experts, on one stream.
// Skipped, visibly, without a device.
#include <gtest/gtest.h>

#include <cstring>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/router.h"
#include "support/cuda_device.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

constexpr Device kLayerGpu = Device::cuda(0);

bool same(const DeviceTensor& got, const Tensor& want) {
  Tensor host = Tensor::zeros(want.dtype(), want.shape()).value();
  EXPECT_TRUE(copy_tensor(got.view(), host.view()).ok());
  return std::memcmp(host.data(), want.data(), static_cast<std::size_t>(want.bytes())) == 0;
}

DeviceTensor room(DType dtype, const Shape& shape) {
  return DeviceTensor::uninitialized(kLayerGpu, dtype, shape).value();
}

TEST(OwnLayer, StagesByThemselvesHaveTheBitsOfTheLayer) {
  REQUIRE_HOPPER();
  for (const std::int64_t tokens : {1, 5, 64}) {
    const test::LayerTensors t = test::make_tensors(51, test::small_spec());
    const FusedMoE layer = test::make_layer(t, test::on_gpu(64));
    const Tensor x = test::random_hidden(52, tokens, t.spec.hidden_size);
    const test::LayerRun want = test::run_layer(layer, x);

    GateLinear::Options gate_options;
    gate_options.device = kLayerGpu;
    const GateLinear gate =
        GateLinear::create(t.gate_weight.view(), t.gate_bias.view(), gate_options).value();
    Router::Options router_options;
    router_options.spec = t.spec.routing;
    router_options.device = kLayerGpu;
    const Router router = Router::create(router_options).value();
    MoeProblem problem;
    problem.num_experts = problem.num_local_experts = t.spec.num_experts;
    problem.top_k = t.spec.routing.top_k;
    problem.hidden_size = t.spec.hidden_size;
    problem.intermediate_size = t.spec.intermediate_size;
    problem.activation = t.spec.activation;
    problem.quant = t.spec.quant;
    problem.max_tokens = 64;
    problem.device = kLayerGpu;
    const auto source = make_stacked_source(t.experts.view());
    ModularKernel::Options kernel_options;
    kernel_options.max_tokens = 64;
    const ModularKernel kernel =
        ModularKernel::create(problem, make_local_prepare_finalize(problem).value(),
                              choose_experts(problem).value()->create(problem, *source).value(),
                              kernel_options)
            .value();

    const DeviceTensor in = DeviceTensor::copy_of(x.view(), kLayerGpu).value();
    DeviceTensor logits = room(DType::kF32, {tokens, t.spec.num_experts});
    DeviceTensor weights = room(DType::kF32, {tokens, router.slots()});
    DeviceTensor ids = room(DType::kI32, {tokens, router.slots()});
    DeviceTensor out = room(DType::kF32, {tokens, t.spec.hidden_size});
    Router::Args r;
    r.router_logits = logits.view();
    r.topk_weights = weights.view();
    r.topk_ids = ids.view();
    ModularKernel::Args a;
    a.hidden_states = in.view();
    a.topk_weights = weights.view();
    a.topk_ids = ids.view();
    a.output = out.view();
    for (const Status& s : {gate.forward(in.view(), logits.view()), router.select_experts(r),
                            kernel.run(a), synchronize(kLayerGpu)}) {
      ASSERT_TRUE(s.ok()) << s.to_string();
    }
    EXPECT_TRUE(same(logits, want.logits)) << tokens;
    EXPECT_TRUE(same(weights, want.topk_weights)) << tokens;
    EXPECT_TRUE(same(ids, want.topk_ids)) << tokens;
    EXPECT_TRUE(same(out, want.output)) << tokens;
    expect_refusal(gate.forward(x.view(), logits.view()), StatusCode::kInvalidArgument,
                   {"hidden_states: got memory of cpu, need memory of cuda:0"});
  }
}

TEST(OwnLayer, ARouterOnAGpuSaysWhatItCannotDo) {
  REQUIRE_HOPPER();
  Router::Options options;
  options.spec = test::small_spec().routing;
  options.spec.method = RoutingMethod::kZeroExpert;
  options.spec.num_zero_experts = 2;
  options.spec.has_correction_bias = true;
  const Tensor bias = Tensor::zeros(DType::kF32, {options.spec.num_experts + 2}).value();
  options.correction_bias = bias.view();
  options.device = kLayerGpu;
  expect_refusal(Router::create(options).status(), StatusCode::kUnsupported, {"num_zero_experts"});
}

}  // namespace
}  // namespace moesaic
