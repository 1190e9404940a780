// A layer put together from the stages' public calls on a GPU: gate, router, experts, on one stream.
// Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/router.h"
#include "numerics/element.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
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

MoeProblem problem_of(const MoeLayerSpec& spec, std::int64_t max_tokens) {
  MoeProblem problem;
  problem.num_experts = problem.num_local_experts = spec.num_experts;
  problem.top_k = spec.routing.top_k;
  problem.hidden_size = spec.hidden_size;
  problem.intermediate_size = spec.intermediate_size;
  problem.activation = spec.activation;
  problem.quant = spec.quant;
  problem.max_tokens = max_tokens;
  problem.device = kLayerGpu;
  return problem;
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
    const MoeProblem problem = problem_of(t.spec, 64);
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

// Every scheme, with a shared expert as experts of its own: the closed layer, which joins kernels
// where it can, has the bits of the stages put together by hand.
TEST(OwnLayer, EverySchemeWithASharedExpertHasTheBitsOfTheLayer) {
  REQUIRE_HOPPER();
  for (const Scheme& scheme : quant_schemes()) {
    if (scheme.name == "f32" || scheme.name == "f16") continue;  // rows of theirs are not bf16
    MoeLayerSpec spec = test::deepseek_like();
    spec.hidden_size = 256;
    spec.intermediate_size = spec.shared.intermediate_size = 128;
    spec.quant = scheme;
    const test::LayerTensors t = test::make_tensors(57, spec);
    const FusedMoE layer = test::make_layer(t, test::on_gpu(64));
    const GateLinear gate =
        GateLinear::create(t.gate_weight.view(), {}, {.device = kLayerGpu}).value();
    Router::Options routing;
    routing.spec = spec.routing;
    routing.correction_bias = t.correction_bias.view();
    routing.device = kLayerGpu;
    const Router router = Router::create(routing).value();
    const MoeProblem routed = problem_of(spec, 64);
    MoeProblem shared = routed;
    shared.num_experts = shared.num_local_experts = shared.top_k = 1;
    shared.intermediate_size = spec.shared.intermediate_size;
    const auto routed_source = make_stacked_source(t.experts.view());
    const auto shared_source = make_stacked_source(t.shared.view());
    const auto routed_experts =
        choose_experts(routed).value()->create(routed, *routed_source).value();
    const auto shared_experts =
        choose_experts(shared).value()->create(shared, *shared_source).value();
    // The fast kernel rounds an expert's row to bf16, the general one does not.
    const DType shared_rows = shared_experts->name() == "cuda_general" ? DType::kF32 : DType::kBF16;
    for (const std::int64_t tokens : {1, 5, 64}) {
      SCOPED_TRACE(testing::Message() << scheme.name << ' ' << tokens);
      const Tensor x = test::random_hidden(58, tokens, spec.hidden_size);
      const test::LayerRun want = test::run_layer(layer, x);
      const DeviceTensor in = DeviceTensor::copy_of(x.view(), kLayerGpu).value();
      DeviceTensor logits = room(DType::kF32, {tokens, spec.num_experts});
      DeviceTensor weights = room(DType::kF32, {tokens, spec.routing.top_k});
      DeviceTensor ids = room(DType::kI32, {tokens, spec.routing.top_k});
      DeviceTensor sum = room(DType::kF32, {tokens, spec.hidden_size});
      DeviceTensor beside = room(shared_rows, {tokens, spec.hidden_size});
      Tensor one = Tensor::zeros(DType::kF32, {tokens, 1}).value();
      for (std::int64_t i = 0; i < tokens; ++i) one.as<float>()[i] = 1.0F;
      const Tensor none = Tensor::zeros(DType::kI32, {tokens, 1}).value();
      const DeviceTensor ones = DeviceTensor::copy_of(one.view(), kLayerGpu).value();
      const DeviceTensor zeros = DeviceTensor::copy_of(none.view(), kLayerGpu).value();
      const auto run = [&](const Experts& experts, const DeviceTensor& slots,
                           const DeviceTensor& factors, DeviceTensor& out) {
        const DeviceTensor workspace = room(DType::kU8, {experts.workspace_size(tokens).value()});
        ExpertsArgs a;
        a.hidden_states = in.view();
        a.topk_ids = slots.view();
        a.topk_weights = factors.view();
        a.workspace = workspace.span();
        a.output = out.view();
        const Status status = experts.run(a);
        return status.ok() ? synchronize(kLayerGpu) : status;
      };
      Router::Args r;
      r.router_logits = logits.view();
      r.topk_weights = weights.view();
      r.topk_ids = ids.view();
      for (const Status& s :
           {gate.forward(in.view(), logits.view()), router.select_experts(r),
            run(*routed_experts, ids, weights, sum), run(*shared_experts, zeros, ones, beside)}) {
        ASSERT_TRUE(s.ok()) << s.to_string();
      }
      Tensor all = Tensor::zeros(DType::kF32, x.shape()).value();
      Tensor part = Tensor::zeros(shared_rows, x.shape()).value();
      ASSERT_TRUE(copy_tensor(sum.view(), all.view()).ok());
      ASSERT_TRUE(copy_tensor(beside.view(), part.view()).ok());
      for (std::int64_t i = 0; i < tokens * spec.hidden_size; ++i) {
        all.as<float>()[i] += load_as_f32(part.data(), shared_rows, i);
      }
      EXPECT_TRUE(same(ids, want.topk_ids));
      EXPECT_TRUE(same(weights, want.topk_weights));
      std::string why;
      EXPECT_TRUE(test::same_bits(all.view(), want.output.view(), &why)) << why;
    }
  }
}

// Everything by enqueue in one graph: 16-bit logits, which the router reads as they are, and memory
// of the caller's only.
TEST(OwnLayer, AGraphOfStagesWithTheCallersWorkspaces) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kRows = 6;
  const test::LayerTensors t = test::make_tensors(53, test::small_spec());
  FusedMoE::Options rounded = test::on_gpu(kRows);
  rounded.router_logits_dtype = DType::kBF16;
  const FusedMoE layer = test::make_layer(t, rounded);
  GateLinear::Options gate_options;
  gate_options.device = kLayerGpu;
  gate_options.logits_dtype = DType::kBF16;
  const GateLinear gate = GateLinear::create(t.gate_weight.view(), {}, gate_options).value();
  Router::Options router_options;
  router_options.spec = t.spec.routing;
  router_options.device = kLayerGpu;
  const Router router = Router::create(router_options).value();
  const MoeProblem problem = problem_of(t.spec, kRows);
  const auto source = make_stacked_source(t.experts.view());
  const auto kernel =
      ModularKernel::create(problem, make_local_prepare_finalize(problem).value(),
                            choose_experts(problem).value()->create(problem, *source).value(),
                            {.max_tokens = kRows, .own_workspace = false})
          .value();
  EXPECT_EQ(kernel.workspace_bytes(), 0);
  const std::int64_t bytes = kernel.workspace_size(kRows).value();
  EXPECT_GE(bytes, kernel.experts().workspace_size(kRows).value());

  DeviceTensor x = room(DType::kBF16, {kRows, t.spec.hidden_size});
  DeviceTensor logits = room(DType::kBF16, {kRows, t.spec.num_experts});
  DeviceTensor weights = room(DType::kF32, {kRows, 2}), ids = room(DType::kI32, {kRows, 2});
  DeviceTensor out = room(DType::kF32, {kRows, t.spec.hidden_size});
  const DeviceTensor gate_workspace = room(DType::kU8, {gate.workspace_size(kRows).value()});
  const DeviceTensor workspace = room(DType::kU8, {bytes});
  Router::Args r;
  r.router_logits = logits.view();
  r.topk_weights = weights.view();
  r.topk_ids = ids.view();
  ModularKernel::Args a;
  a.hidden_states = x.view();
  a.topk_weights = weights.view();
  a.topk_ids = ids.view();
  a.output = out.view();
  a.workspace = workspace.span();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const Status captured[] = {gate.enqueue({stream}, x.view(), logits.view(), gate_workspace.span()),
                             router.enqueue({stream}, r), kernel.enqueue({stream}, a)};
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  for (const Status& s : captured) ASSERT_TRUE(s.ok()) << s.to_string();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (std::uint64_t replay = 0; replay < 4; ++replay) {
    const Tensor fresh = test::random_hidden(54 + replay, kRows, t.spec.hidden_size);
    ASSERT_TRUE(copy_tensor(fresh.view(), x.view()).ok());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const test::LayerRun want = test::run_layer(layer, fresh);
    EXPECT_TRUE(same(weights, want.topk_weights)) << replay;
    EXPECT_TRUE(same(ids, want.topk_ids)) << replay;
    EXPECT_TRUE(same(out, want.output)) << replay;
  }
  (void)cudaGraphExecDestroy(exec);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);

  a.workspace = {};
  expect_refusal(kernel.enqueue({}, a), StatusCode::kInvalidArgument,
                 {"workspace: got none", "own_workspace"});
  a.workspace = workspace.span().first(256);
  expect_refusal(kernel.enqueue({}, a), StatusCode::kWorkspaceTooSmall, {"workspace: got 256"});
  a.workspace = workspace.span().subspan(64);
  expect_refusal(kernel.enqueue({}, a), StatusCode::kInvalidLayout, {"workspace", "256"});
  std::vector<std::byte> host(static_cast<std::size_t>(bytes) + 256);
  const auto at = reinterpret_cast<std::uintptr_t>(host.data());
  a.workspace = std::span(host).subspan((256 - at % 256) % 256, static_cast<std::size_t>(bytes));
  expect_refusal(kernel.enqueue({}, a), StatusCode::kInvalidArgument, {"workspace", "host memory"});
  expect_refusal(kernel.workspace_size(kRows + 1).status(), StatusCode::kLimitExceeded,
                 {"max_tokens"});
  ExpertsArgs e;
  e.hidden_states = {t.gate_weight.data(), DType::kBF16, {1, 64}};
  expect_refusal(kernel.experts().enqueue({}, e), StatusCode::kUnsupported, {"enqueue", "cpu"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Static scales of a call are for schemes that have such scales.
TEST(OwnLayer, ScalesOfACallAreRefusedByName) {
  REQUIRE_HOPPER();
  for (const char* quant : {"bf16", "fp8-block"}) {
    MoeLayerSpec spec = test::small_spec();
    spec.hidden_size = 256;
    spec.intermediate_size = 128;
    spec.quant = quant_scheme_from_name(quant).value();
    const test::LayerTensors t = test::make_tensors(55, spec);
    const MoeProblem problem = problem_of(spec, 2);
    const auto source = make_stacked_source(t.experts.view());
    const auto kernel =
        ModularKernel::create(problem, make_local_prepare_finalize(problem).value(),
                              choose_experts(problem).value()->create(problem, *source).value(),
                              {.max_tokens = 2})
            .value();
    const DeviceTensor x = room(DType::kBF16, {2, 256});
    const DeviceTensor weights = room(DType::kF32, {2, 2}), ids = room(DType::kI32, {2, 2});
    DeviceTensor out = room(DType::kF32, {2, 256});
    Tensor scale = Tensor::zeros(DType::kF32, {1}).value();
    scale.as<float>()[0] = 0.5F;
    ModularKernel::Args a;
    a.hidden_states = x.view();
    a.topk_weights = weights.view();
    a.topk_ids = ids.view();
    a.output = out.view();
    a.a1_scale = scale.view();
    expect_refusal(kernel.enqueue({}, a), StatusCode::kUnsupported, {"a1_scale"});
    a.a1_scale = {};
    a.a2_scale = scale.view();
    expect_refusal(kernel.enqueue({}, a), StatusCode::kUnsupported, {"a2_scale"});
  }
}

}  // namespace
}  // namespace moesaic
