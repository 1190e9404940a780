// Examples W2 to W10 of docs/spec/routing.md section 10.
#include <gtest/gtest.h>

#include "moesaic/router.h"
#include "router/eplb_map.h"
#include "router/router_fixture.h"
#include "router/scoring.h"

namespace moesaic {
namespace {

using test::expect_digits;
using test::matrix;
using test::route;
using test::Routed;
using test::with;
using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;
using enum ScoringFunc;

TEST(RouterExamples, W2Tie) {
  const Tensor l = matrix(1, {1, 2, 0.5F, 2});
  Routed r = route(with(test::topk_spec(kSoftmax, 4, 2, false)), l);
  EXPECT_EQ(r.ids, (Ids{1, 3}));
  expect_digits(r.weights, {.385950, .385950});
  r = route(with(test::topk_spec(kSoftmax, 4, 2, true)), l);
  EXPECT_EQ(r.weights, (Floats{.5F, .5F}));
  float scores[4];
  router::score_row(kSoftmax, l.as<float>(), 4, scores);
  expect_digits(Floats(scores, scores + 4), {.141983, .385950, .086117, .385950});
}

TEST(RouterExamples, W3Softmax) {
  const Tensor l = matrix(1, {0.1F, 1.2F, -0.7F, 0.9F, 2.0F, -1.5F});
  Routed r = route(with(test::topk_spec(kSoftmax, 6, 3, false)), l);
  EXPECT_EQ(r.ids, (Ids{4, 1, 3}));
  expect_digits(r.weights, {.492812, .221435, .164043});
  const std::vector<double> renormalized = {.561104, .252120, .186775};
  r = route(with(test::topk_spec(kSoftmax, 6, 3, true)), l);
  EXPECT_EQ(r.ids, (Ids{4, 1, 3}));
  expect_digits(r.weights, renormalized);
  // The same mathematics: softmax over the selected logits.
  r = route(with(test::method_spec(RoutingMethod::kTopKSoftmax, 6, 3)), l);
  EXPECT_EQ(r.ids, (Ids{4, 1, 3}));
  expect_digits(r.weights, renormalized);
}

TEST(RouterExamples, W4SigmoidWithBias) {
  const Tensor l = matrix(1, {0, 1, -1, 2});
  const Floats bias = {.5F, 0, .9F, -.6F};
  RoutingSpec spec = test::topk_spec(kSigmoid, 4, 2, false);
  Routed r = route(with(spec), l, bias);
  EXPECT_EQ(r.ids, (Ids{2, 0}));
  expect_digits(r.weights, {.268941, .5});
  EXPECT_EQ(route(with(spec), l).ids, (Ids{3, 1}));
  spec.renormalize = true;
  expect_digits(route(with(spec), l, bias).weights, {.349755, .650245});
  spec.routed_scaling_factor = 2.5;
  expect_digits(route(with(spec), l, bias).weights, {.874389, 1.625611});
  spec.scale_on_output = true;  // the layer scales, the router must not
  expect_digits(route(with(spec), l, bias).weights, {.349755, .650245});
}

TEST(RouterExamples, W5GroupedSigmoidWithBias) {
  const Tensor l = matrix(1, {2, -1, .5F, .4F, 1.5F, 1, -3, 3});
  const Floats bias = {0, 0, .3F, .3F, 0, 0, 0, -.2F};
  RoutingSpec spec = test::grouped_spec(kSigmoid, 8, 3, false, 4, 2);
  Routed r = route(with(spec), l, bias);
  EXPECT_EQ(r.ids, (Ids{2, 3, 4}));
  expect_digits(r.weights, {.622459, .598688, .817574});
  spec.renormalize = true;
  expect_digits(route(with(spec), l, bias).weights, {.305318, .293658, .401023});
  spec.routed_scaling_factor = 2.5;
  expect_digits(route(with(spec), l, bias).weights, {.763296, .734146, 1.002558});
}

TEST(RouterExamples, W5GroupedSoftmaxWithoutBias) {
  const Tensor l = matrix(1, {2, -1, .5F, .4F, 1.5F, 1, -3, 3});
  RoutingSpec spec = test::grouped_spec(kSoftmax, 8, 3, false, 4, 2);
  Routed r = route(with(spec), l);
  EXPECT_EQ(r.ids, (Ids{7, 0, 1}));
  expect_digits(r.weights, {.525349, .193265, .009622});
  spec.renormalize = true;
  expect_digits(route(with(spec), l).weights, {.721399, .265388, .013213});
}

// Two good experts outrank one that is a little better.
TEST(RouterExamples, GroupedSoftmaxByTheBestTwo) {
  const Tensor l = matrix(1, {2, -3, .5F, .4F, 1.8F, 1.7F, -3, 3});
  RoutingSpec spec = test::grouped_spec(kSoftmax, 8, 3, false, 4, 2);
  EXPECT_EQ(route(with(spec), l).ids, (Ids{7, 0, 1}));
  spec.group_by_best_two = true;
  Routed r = route(with(spec), l);
  EXPECT_EQ(r.ids, (Ids{7, 4, 5}));
  expect_digits(r.weights, {.475529, .143227, .129597});
  spec.renormalize = true;
  expect_digits(route(with(spec), l).weights, {.635435, .191389, .173176});
}

TEST(RouterExamples, W6SqrtSoftplusWithBiasAndHash) {
  const Tensor l = matrix(1, {0, 1, -1, 2});
  float scores[4];
  router::score_row(ScoringFunc::kSqrtSoftplus, l.as<float>(), 4, scores);
  expect_digits(Floats(scores, scores + 4), {.832555, 1.145976, .559698, 1.458399});

  RoutingSpec spec = test::topk_spec(ScoringFunc::kSqrtSoftplus, 4, 2, true);
  const Floats bias = {8, 8.1F, 8.9F, 7};
  Routed r = route(with(spec), l, bias);
  EXPECT_EQ(r.ids, (Ids{2, 1}));
  expect_digits(r.weights, {.328139, .671861});
  spec.routed_scaling_factor = 1.5;
  expect_digits(route(with(spec), l, bias).weights, {.492208, 1.007792});

  spec.method = RoutingMethod::kHash;
  Router::Options options = with(spec);
  Tensor table = Tensor::zeros(DType::kI32, {3, 2}).value();
  const Ids entries = {0, 1, 1, 3, 2, 0};
  std::copy(entries.begin(), entries.end(), table.as<std::int32_t>());
  options.hash_table = table.view();
  const Router router = Router::create(options).value();
  const Tensor tokens = test::vector_i32({2});
  Router::Args args;
  args.router_logits = l.view();
  args.input_ids = tokens.view();
  r = test::run(router, args);
  EXPECT_EQ(r.ids, (Ids{2, 0}));
  expect_digits(r.weights, {.603013, .896987});
}

TEST(RouterExamples, W7ZeroExperts) {
  RoutingSpec spec = test::method_spec(RoutingMethod::kZeroExpert, 4, 3);
  spec.num_zero_experts = 2;
  spec.routed_scaling_factor = 6;
  spec.has_correction_bias = true;
  Router::Options options = with(spec);
  Tensor bias = Tensor::zeros(DType::kF32, {6}).value();
  bias.as<float>()[5] = .3F;
  options.correction_bias = bias.view();
  const Router router = Router::create(options).value();
  const Tensor l = matrix(1, {1, .2F, .8F, -.5F, .9F, 0});
  const Tensor hidden = matrix(1, {1, -2, 0.5F});
  Tensor zero_out = Tensor::uninitialized(DType::kF32, {1, 3}).value();
  test::poison(zero_out.view());
  Router::Args args;
  args.hidden_states = hidden.view();
  args.router_logits = l.view();
  args.zero_expert_output = zero_out.view();
  const Routed r = test::run(router, args);
  EXPECT_EQ(r.ids, (Ids{0, 0, 0}));
  expect_digits(r.weights, {0, 1.594088, 0});
  const float* z = zero_out.as<float>();
  EXPECT_NEAR(z[0], 2.028823, 1e-6);
  EXPECT_EQ(z[1], -2 * z[0]);
  EXPECT_EQ(z[2], z[0] / 2);

  // The weights before the zero experts are taken out: the plain biased router on six experts.
  RoutingSpec plain = test::topk_spec(kSoftmax, 6, 3, false);
  plain.routed_scaling_factor = 6;
  const Routed before = route(with(plain), l, {0, 0, 0, 0, 0, .3F});
  EXPECT_EQ(before.ids, (Ids{5, 0, 4}));
  expect_digits(before.weights, {.586432, 1.594088, 1.442391});
}

TEST(RouterExamples, W8Llama4) {
  const auto weight = [](float logit) {
    const Routed r =
        route(with(test::method_spec(RoutingMethod::kLlama4, 3, 1)), matrix(1, {-5, logit, -6}));
    EXPECT_EQ(r.ids, (Ids{1}));
    return r.weights;
  };
  expect_digits(weight(1.7F), {.845535});
  expect_digits(weight(-.3F), {.425557});
}

TEST(RouterExamples, W9SparseMixer) {
  const auto mix = [](const Floats& logits) {
    return route(with(test::method_spec(RoutingMethod::kSparseMixer, 4, 2)), matrix(1, logits));
  };
  Routed r = mix({2, 1.99F, 1, -4});
  EXPECT_EQ(r.ids, (Ids{0, 1}));
  expect_digits(r.weights, {.502500, 1.0});
  r = mix({2, 1, .99F, -4});
  EXPECT_EQ(r.ids, (Ids{0, 1}));
  expect_digits(r.weights, {1.0, .502500});
}

TEST(RouterExamples, W10Eplb) {
  const Ids l2p = {0, 4, 1, 5, 2, -1, 3, -1};
  const Ids count = {2, 2, 1, 1};
  Ids load(6, 0);
  EplbState state{l2p, count, load, 2, true};
  ASSERT_TRUE(router::check_eplb_state(state, 4).ok());
  const Ids logical = {0, 1, 0, 2, 1, 0, 3, 0, -1, 0};
  const Ids physical = {0, 5, 0, 2, 1, 4, 3, 4, -1, 4};
  Ids ids = logical;
  router::map_logical_to_physical(state, 4, 5, 2, nullptr, ids.data());
  EXPECT_EQ(ids, physical);
  EXPECT_EQ(load, (Ids{2, 1, 1, 1, 3, 1}));

  // The same through the router, with a custom function that knows the answer.
  RoutingSpec spec = test::method_spec(RoutingMethod::kCustom, 4, 2);
  Router::Options options = with(spec);
  options.custom = [&](ConstTensorView, ConstTensorView, bool, TensorView w, TensorView out) {
    std::fill_n(w.as<float>(), 10, 0.5F);
    std::copy(logical.begin(), logical.end(), out.as<std::int32_t>());
    return Status();
  };
  Ids captured;
  options.capture = [&](ConstTensorView v) {
    captured.assign(v.as<std::int32_t>(), v.as<std::int32_t>() + v.shape.num_elements().value());
  };
  const Router router = Router::create(options).value();
  std::fill(load.begin(), load.end(), 0);
  const Tensor l = Tensor::zeros(DType::kF32, {5, 4}).value();
  Router::Args args;
  args.router_logits = l.view();
  args.eplb = &state;
  EXPECT_EQ(test::run(router, args).ids, physical);
  EXPECT_EQ(load, (Ids{2, 1, 1, 1, 3, 1}));
  EXPECT_EQ(captured, logical) << "the capture callback sees logical ids";
}

}  // namespace
}  // namespace moesaic
