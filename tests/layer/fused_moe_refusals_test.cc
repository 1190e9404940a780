// What a layer refuses, when it is made and when it is called: stage, field, value and need.
#include <gtest/gtest.h>

#include <functional>

#include "layer/layer_case.h"
#include "moesaic/fused_moe.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::deepseek_like;
using test::expect_refusal;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::random_hidden;
using test::small_spec;

void expect_refused(const Status& status, StatusCode code, std::string_view words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
}

TEST(FusedMoE, CreateRefusesWithStageFieldAndNeed) {
  using Spoil = std::function<void(MoeLayerWeights&, FusedMoE::Options&)>;
  const LayerTensors t = make_tensors(25, deepseek_like());
  const auto refuse = [&](const Spoil& spoil, StatusCode code, std::string_view words) {
    MoeLayerWeights weights = t.weights();
    FusedMoE::Options options;
    spoil(weights, options);
    const auto layer = FusedMoE::create(std::move(weights), options);
    ASSERT_FALSE(layer.ok()) << words;
    expect_refused(layer.status(), code, words);
  };
  refuse([](auto&, auto& o) { o.max_tokens = 0; }, StatusCode::kInvalidArgument,
         "max_tokens: got 0");
  refuse([](auto&, auto& o) { o.num_threads = -1; }, StatusCode::kInvalidArgument, "num_threads");
  refuse([](auto&, auto& o) { o.quant = "mxfp5"; }, StatusCode::kNotFound, "mxfp4");
  refuse([](auto&, auto& o) { o.backend = "cuda_sm90"; }, StatusCode::kUnsupported,
         "experts backend cuda_sm90: device: cpu, need a Hopper GPU");
  refuse([](auto&, auto& o) { o.quant = "int4-fp8"; }, StatusCode::kUnsupported,
         "experts: hidden_size: got 64");
  refuse([](auto& w, auto&) { w.experts = nullptr; }, StatusCode::kInvalidArgument,
         "experts: got no source");
  refuse([](auto& w, auto&) { w.tensors.gate_weight = Tensor(); }, StatusCode::kInvalidArgument,
         "gate_weight: got none");
  refuse([](auto& w, auto&) { w.tensors.gate_weight = random_hidden(1, 8, 32); },
         StatusCode::kInvalidShape, "gate_weight: got [8, 32], need [8, 64]");
  refuse([](auto& w, auto&) { w.tensors.e_score_correction_bias = Tensor(); },
         StatusCode::kInvalidArgument, "e_score_correction_bias: got none");
  refuse([](auto& w, auto&) { w.tensors.gate_bias = random_hidden(1, 1, 8); },
         StatusCode::kInvalidArgument, "gate_bias");
  refuse([](auto& w, auto&) { w.shared = nullptr; }, StatusCode::kInvalidArgument,
         "shared: got no source");
  refuse([](auto& w, auto&) { w.spec.routing.top_k = 9; }, StatusCode::kInvalidArgument, "top_k");
  refuse([](auto& w, auto&) { w.spec.intermediate_size = 33; }, StatusCode::kInvalidShape,
         "experts: expert 0: w13");
  refuse([](auto&, auto& o) { o.parallel.tp_size = 3; }, StatusCode::kInvalidArgument,
         "intermediate_size: got 32 with tp_size 3, need a multiple of tp_size");
  refuse([](auto&, auto& o) { o.parallel.ep_rank = 5; }, StatusCode::kInvalidArgument, "ep_rank");
  refuse([](auto&, auto& o) { o.transform.hidden_size = 32; }, StatusCode::kInvalidArgument,
         "transform.input");
  refuse(
      [](auto&, auto& o) {
        o.transform.hidden_size = 32;
        o.transform.input = [](ConstTensorView, TensorView) { return Status(); };
      },
      StatusCode::kInvalidArgument, "transform.hidden_size: got 32, need hidden_size 64");
  refuse(
      [](auto& w, auto&) {
        w.spec.routing = RoutingSpec();
        w.spec.routing.num_experts = 8;
        w.spec.routing.top_k = 2;
        w.spec.routing.method = RoutingMethod::kSimulated;
        w.tensors.e_score_correction_bias = Tensor();
      },
      StatusCode::kUnsupported, "routing.method: got simulated");
  refuse(
      [](auto& w, auto&) {
        w.spec.routing = RoutingSpec();
        w.spec.routing.num_experts = 8;
        w.spec.routing.num_zero_experts = 4;
        w.spec.routing.top_k = 9;
        w.spec.routing.method = RoutingMethod::kZeroExpert;
        w.spec.routing.has_correction_bias = true;
      },
      StatusCode::kUnsupported, "routing.top_k: got 9, need at most 8 (num_experts)");
  refuse([](auto& w, auto&) { w.spec.input_norm_eps = 1e-6; }, StatusCode::kInvalidArgument,
         "experts_norm_weight: got none");
  refuse([](auto& w, auto&) { w.spec.input_norm_eps = -1; }, StatusCode::kInvalidArgument,
         "input_norm_eps: got -1");
  refuse([](auto& w, auto&) { w.tensors.expert_scale = random_hidden(1, 1, 8); },
         StatusCode::kInvalidArgument, "expert_scale");
  refuse(
      [](auto& w, auto& o) {
        w.spec.input_norm_eps = 1e-6;
        o.transform.hidden_size = 64;
        o.transform.input = [](ConstTensorView, TensorView) { return Status(); };
      },
      StatusCode::kUnsupported, "routed transforms: got one with input_norm_eps");
}

TEST(FusedMoE, ForwardRefusesWithFieldValueAndNeed) {
  const LayerTensors t = make_tensors(26, small_spec());
  const FusedMoE layer = make_layer(t);
  const Tensor x = random_hidden(27, 3, 64);
  Tensor out = Tensor::zeros(DType::kF32, {3, 64}).value();
  expect_refused(layer.forward(ConstTensorView(x.data(), DType::kBF16, {6, 32}), out.view()),
                 StatusCode::kInvalidShape, "hidden_states: got [6, 32], need [M, 64]");
  expect_refused(layer.forward(ConstTensorView(x.data(), DType::kI16, {3, 64}), out.view()),
                 StatusCode::kInvalidDType, "hidden_states: got I16");
  expect_refused(layer.forward(x.view(), TensorView(out.data(), DType::kF32, {2, 64})),
                 StatusCode::kInvalidShape, "output: got [2, 64], need [3, 64]");
  expect_refused(layer.forward(x.view(), TensorView(out.data(), DType::kI32, {3, 64})),
                 StatusCode::kInvalidDType, "output: got I32");
  expect_refused(layer.forward(ConstTensorView(out.data(), DType::kBF16, {3, 64}), out.view()),
                 StatusCode::kAliasing, "output overlaps hidden_states");
  expect_refused(layer.forward(ConstTensorView(nullptr, DType::kBF16, {3, 64}), out.view()),
                 StatusCode::kInvalidArgument, "null");
  expect_refused(layer.forward(ConstTensorView(x.data(), DType::kBF16, {-1, -1, 64}),
                               TensorView(out.data(), DType::kF32, {1, 64})),
                 StatusCode::kInvalidShape, "hidden_states: got [-1, -1, 64], need dimensions");
  Tensor ids = Tensor::zeros(DType::kI32, {3, 3}).value();
  FusedMoE::Trace trace;
  trace.topk_ids = ids.view();
  expect_refused(layer.forward(x.view(), out.view(), trace), StatusCode::kInvalidShape,
                 "trace.topk_ids: got [3, 3], need [3, 2]");
}

TEST(FusedMoE, TracesThatOverlapAreRefused) {
  const LayerTensors t = make_tensors(26, deepseek_like());  // with shared experts
  const FusedMoE layer = make_layer(t);
  const std::int64_t k = t.spec.routing.top_k;
  const Tensor x = random_hidden(27, 3, 64);
  Tensor y = Tensor::zeros(DType::kF32, {3, 64}).value();
  Tensor part = Tensor::zeros(DType::kF32, {3, 64}).value();
  Tensor logits = Tensor::zeros(DType::kF32, {3, t.spec.routing.num_experts}).value();
  Tensor weights = Tensor::zeros(DType::kF32, {3, k}).value();
  Tensor ids = Tensor::zeros(DType::kI32, {3, k}).value();
  FusedMoE::Args good;
  good.hidden_states = x.view();
  good.output = y.view();
  good.shared_output = part.view();
  good.trace.router_logits = logits.view();
  good.trace.topk_weights = weights.view();
  good.trace.topk_ids = ids.view();
  ASSERT_TRUE(layer.forward(good).ok());
  struct Traced {
    TensorView FusedMoE::Trace::*view;
    const char* field;
  };
  const auto refused = [&](const Traced& trace, std::byte* memory, const char* other) {
    FusedMoE::Args args = good;
    (args.trace.*trace.view).data = memory;
    expect_refusal(layer.forward(args), StatusCode::kAliasing, {trace.field, "overlap", other});
  };
  for (const Traced& trace : {Traced{&FusedMoE::Trace::router_logits, "trace.router_logits"},
                              Traced{&FusedMoE::Trace::topk_weights, "trace.topk_weights"},
                              Traced{&FusedMoE::Trace::topk_ids, "trace.topk_ids"}}) {
    refused(trace, const_cast<std::byte*>(x.data()), "hidden_states");
    refused(trace, y.data() + y.bytes() - 4, "output");
    refused(trace, part.data(), "shared_output");
  }
  refused({&FusedMoE::Trace::topk_weights, "trace.topk_weights"}, logits.data(),
          "trace.router_logits");
  refused({&FusedMoE::Trace::topk_ids, "trace.topk_ids"}, weights.data(), "trace.topk_weights");
  // Between rows that lie apart as well.
  Tensor wide = Tensor::zeros(DType::kBF16, {3, 128}).value();
  good.hidden_states = ConstTensorView(wide.data(), DType::kBF16, {3, 64});
  good.hidden_states.strides[0] = 128;
  ASSERT_TRUE(layer.forward(good).ok());
  refused({&FusedMoE::Trace::topk_ids, "trace.topk_ids"}, wide.data() + 3 * 128, "hidden_states");
}

TEST(FusedMoe, ViewsOfAnotherDeviceAreRefused) {
  const LayerTensors t = make_tensors(31, small_spec());
  const FusedMoE layer = make_layer(t);
  const Tensor x = random_hidden(32, 2, t.spec.hidden_size);
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  const Device gpu = Device::cuda(0);
  const ConstTensorView there(x.data(), x.dtype(), x.shape(), gpu);
  expect_refusal(layer.forward(there, y.view()), StatusCode::kInvalidArgument,
                 {"hidden_states: got memory of cuda:0, need memory of cpu"});
  expect_refusal(layer.forward(x.view(), {y.data(), DType::kF32, y.shape(), gpu}),
                 StatusCode::kInvalidArgument, {"output: got memory of cuda:0"});
  Tensor logits =
      Tensor::zeros(DType::kF32, {2, t.spec.routing.num_experts + t.spec.routing.num_zero_experts})
          .value();
  FusedMoE::Trace trace;
  trace.router_logits = {logits.data(), DType::kF32, logits.shape(), gpu};
  expect_refusal(layer.forward(x.view(), y.view(), trace), StatusCode::kInvalidArgument,
                 {"trace.router_logits: got memory of cuda:0"});
  EXPECT_TRUE(layer.forward(x.view(), y.view()).ok());
}

}  // namespace
}  // namespace moesaic
