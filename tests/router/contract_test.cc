// The router's fixed order of steps: padding, shared slots, capture, EPLB, dtype of the ids; and
// what must not change a row.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <stdexcept>

#include "cpu/team.h"
#include "moesaic/log.h"
#include "router/eplb_map.h"
#include "router/router_fixture.h"
#include "router/scoring.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::Rng;
using test::Routed;
using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;

Router::Options options_for(std::int64_t experts = 16, std::int64_t k = 3) {
  Router::Options o;
  o.spec = test::topk_spec(ScoringFunc::kSoftmax, experts, k, true);
  return o;
}

Tensor mask(const std::vector<std::uint8_t>& values) {
  Tensor t = Tensor::zeros(DType::kU8, {static_cast<std::int64_t>(values.size())}).value();
  std::copy(values.begin(), values.end(), t.as<std::uint8_t>());
  return t;
}

TEST(RouterContract, RowsDoNotDependOnBatchOrThreads) {
  Rng rng(41);
  const std::int64_t m = 300, e = 64, k = 6;
  const Tensor l = test::random_normal(rng, DType::kF32, {m, e}, 2.0);
  Router::Options options;
  options.spec = test::grouped_spec(ScoringFunc::kSigmoid, e, k, true, 8, 4);
  options.num_threads = 1;
  const Routed one = test::run(Router::create(options).value(), l);
  for (const int threads : {2, 5, 0}) {
    options.num_threads = threads;
    const cpu::ScopedTeams teams;
    const Routed many = test::run(Router::create(options).value(), l);
    EXPECT_EQ(many.ids, one.ids);
    EXPECT_EQ(many.weights, one.weights);
  }
  const Router router = Router::create(options).value();
  for (std::int64_t t = 0; t < m; ++t) {
    Router::Args args;
    args.router_logits = ConstTensorView(l.data() + t * e * 4, DType::kF32, {1, e});
    const Routed r = test::run(router, args);
    ASSERT_EQ(r.ids, one.row_ids(t)) << t;
    ASSERT_EQ(r.weights, one.row_weights(t)) << t;
  }
}

TEST(RouterContract, LogitDTypesAreWidenedFirst) {
  Rng rng(42);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor narrow = test::random_normal(rng, dtype, {30, 16}, 2.0);
    Tensor wide = Tensor::zeros(DType::kF32, {30, 16}).value();
    const auto values = test::to_doubles(narrow.view());
    for (std::size_t i = 0; i < values.size(); ++i) {
      wide.as<float>()[i] = static_cast<float>(values[i]);
    }
    const Router router = Router::create(options_for()).value();
    const Routed a = test::run(router, narrow), b = test::run(router, wide);
    EXPECT_EQ(a.ids, b.ids);
    EXPECT_EQ(a.weights, b.weights);
  }
}

TEST(RouterContract, PaddingRowsAreErased) {
  Rng rng(43);
  const Tensor l = test::random_normal(rng, DType::kF32, {4, 16});
  const Tensor padding = mask({0, 1, 0, 255});
  Router::Options options = options_for();
  options.num_fused_shared_experts = 1;
  const Router router = Router::create(options).value();
  Router::Args args;
  args.router_logits = l.view();
  const Routed all = test::run(router, args);
  args.padding_mask = padding.view();
  const Routed r = test::run(router, args);
  for (const std::int64_t t : {1, 3}) {
    EXPECT_EQ(r.row_ids(t), (Ids{-1, -1, -1, -1}));
    EXPECT_EQ(r.row_weights(t), (Floats{0, 0, 0, 0}));
  }
  for (const std::int64_t t : {0, 2}) {
    EXPECT_EQ(r.row_ids(t), all.row_ids(t));
    EXPECT_EQ(r.row_weights(t), all.row_weights(t));
  }
}

TEST(RouterContract, SharedSlotsFollowUnscaled) {
  Rng rng(44);
  const Tensor l = test::random_normal(rng, DType::kF32, {5, 16});
  Router::Options options = options_for();
  options.spec.routed_scaling_factor = 2.5;
  const Routed plain = test::run(Router::create(options).value(), l);
  options.num_fused_shared_experts = 2;
  options.shared_expert_weight = 0.75F;
  const Router router = Router::create(options).value();
  EXPECT_EQ(router.slots(), 5);
  const Routed r = test::run(router, l);
  for (std::int64_t t = 0; t < 5; ++t) {
    Ids ids = plain.row_ids(t);
    ids.insert(ids.end(), {16, 17});
    Floats weights = plain.row_weights(t);
    weights.insert(weights.end(), {0.75F, 0.75F});
    EXPECT_EQ(r.row_ids(t), ids);
    EXPECT_EQ(r.row_weights(t), weights);
  }
  // Behind a custom function too, which sees [M, k] only.
  Router::Options custom;
  custom.spec = test::method_spec(RoutingMethod::kCustom, 16, 3);
  custom.num_fused_shared_experts = 1;
  custom.custom = [](ConstTensorView, ConstTensorView, bool, TensorView w, TensorView ids) {
    EXPECT_EQ(w.shape, Shape({5, 3}));
    EXPECT_TRUE(w.is_contiguous() && ids.is_contiguous());
    std::iota(w.as<float>(), w.as<float>() + 15, 1.0F);
    std::iota(ids.as<std::int32_t>(), ids.as<std::int32_t>() + 15, 0);
    return Status();
  };
  const Routed c = test::run(Router::create(custom).value(), l);
  EXPECT_EQ(c.row_ids(4), (Ids{12, 13, 14, 16}));
  EXPECT_EQ(c.row_weights(4), (Floats{13, 14, 15, 1}));
}

TEST(RouterContract, IdsInEveryDType) {
  Rng rng(45);
  const Tensor l = test::random_normal(rng, DType::kF32, {6, 16});
  const Router router = Router::create(options_for()).value();
  const Routed want = test::run(router, l);
  Tensor w = Tensor::zeros(DType::kF32, {6, 3}).value();
  Router::Args args;
  args.router_logits = l.view();
  args.topk_weights = w.view();
  for (const DType dtype : {DType::kI64, DType::kU32, DType::kI32}) {
    Tensor ids = Tensor::uninitialized(dtype, {6, 3}).value();
    test::poison(ids.view());
    args.topk_ids = ids.view();
    ASSERT_TRUE(router.select_experts(args).ok());
    for (std::size_t i = 0; i < 18; ++i) {
      const std::int64_t got = dtype == DType::kI64   ? ids.as<std::int64_t>()[i]
                               : dtype == DType::kU32 ? std::int64_t{ids.as<std::uint32_t>()[i]}
                                                      : std::int64_t{ids.as<std::int32_t>()[i]};
      EXPECT_EQ(got, want.ids[i]);
    }
  }
  // An empty slot has no unsigned form.
  const Tensor padding = mask({0, 0, 0, 0, 1, 0});
  args.padding_mask = padding.view();
  Tensor ids = Tensor::zeros(DType::kU32, {6, 3}).value();
  args.topk_ids = ids.view();
  const Status s = router.select_experts(args);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(s.message().find("U32 and an empty slot (-1) at [4, 0]"), std::string::npos)
      << s.message();
  Tensor wide = Tensor::zeros(DType::kI64, {6, 3}).value();
  args.topk_ids = wide.view();
  ASSERT_TRUE(router.select_experts(args).ok());
  EXPECT_EQ(wide.as<std::int64_t>()[12], -1);
}

// Property 10, with random maps, padding and a capture callback.
TEST(RouterContract, EplbMapsAndCounts) {
  Rng rng(46);
  const std::int64_t m = 40, e = 16, k = 3, physical = 24, max_replicas = 9;
  // Physical slot p holds logical p for p < E; the rest are copies of random experts.
  std::vector<std::int32_t> p2l(static_cast<std::size_t>(physical));
  std::vector<std::int32_t> l2p(static_cast<std::size_t>(e * max_replicas), -1);
  std::vector<std::int32_t> count(static_cast<std::size_t>(e), 0);
  for (std::int32_t p = 0; p < physical; ++p) {
    const auto logical = static_cast<std::size_t>(p < e ? p : rng.integer(0, e - 1));
    p2l[static_cast<std::size_t>(p)] = static_cast<std::int32_t>(logical);
    l2p[logical * max_replicas + static_cast<std::size_t>(count[logical]++)] = p;
  }
  std::vector<std::int32_t> load(static_cast<std::size_t>(physical), 7);
  EplbState state{l2p, count, load, max_replicas, true};

  const Tensor l = test::random_normal(rng, DType::kF32, {m, e});
  std::vector<std::uint8_t> pad(static_cast<std::size_t>(m), 0);
  for (std::size_t t = 30; t < 40; ++t) pad[t] = 1;
  const Tensor padding = mask(pad);
  Router::Options options = options_for(e, k);
  Ids captured;
  options.capture = [&](ConstTensorView v) {
    captured.assign(v.as<std::int32_t>(), v.as<std::int32_t>() + m * k);
  };
  const Router router = Router::create(options).value();
  Router::Args args;
  args.router_logits = l.view();
  args.padding_mask = padding.view();
  const Routed logical = test::run(router, args);
  EXPECT_EQ(captured, logical.ids);
  args.eplb = &state;
  const Routed mapped = test::run(router, args);
  EXPECT_EQ(captured, logical.ids) << "capture sees logical ids with EPLB too";
  EXPECT_EQ(mapped.weights, logical.weights);
  std::vector<std::int32_t> expected_load(static_cast<std::size_t>(physical), 7);
  for (std::size_t p = 0; p < mapped.ids.size(); ++p) {
    const std::int32_t id = logical.ids[p];
    if (id < 0) {
      EXPECT_EQ(mapped.ids[p], -1);
      continue;
    }
    const std::int32_t phys = mapped.ids[p];
    ASSERT_TRUE(phys >= 0 && phys < physical);
    EXPECT_EQ(p2l[static_cast<std::size_t>(phys)], id);
    const auto replica = p % static_cast<std::size_t>(count[static_cast<std::size_t>(id)]);
    EXPECT_EQ(phys, l2p[static_cast<std::size_t>(id) * max_replicas + replica]);
    ++expected_load[static_cast<std::size_t>(phys)];
  }
  EXPECT_EQ(load, expected_load);
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), 0), 7 * physical + 30 * k);

  state.record = false;
  const Routed unrecorded = test::run(router, args);
  EXPECT_EQ(unrecorded.ids, mapped.ids);
  EXPECT_EQ(load, expected_load);
}

// Padding tokens whose ids were kept map like any other, but leave no load behind.
TEST(RouterContract, EplbDoesNotCountPadding) {
  const Ids l2p = {0, 2, 1, -1}, count = {2, 1};
  Ids load(3, 0);
  const EplbState state{l2p, count, load, 2, true};
  const std::uint8_t padding[] = {0, 1, 0};
  Ids ids = {0, 0, 0, 0, 1, 0};
  router::map_logical_to_physical(state, 2, 3, 2, padding, ids.data());
  EXPECT_EQ(ids, (Ids{0, 2, 0, 2, 1, 2}));
  EXPECT_EQ(load, (Ids{1, 1, 2}));
  // The counter stops at its largest value instead of wrapping.
  load[1] = std::numeric_limits<std::int32_t>::max();
  std::int32_t one = 1;
  router::map_logical_to_physical(state, 2, 1, 1, nullptr, &one);
  EXPECT_EQ(load[1], std::numeric_limits<std::int32_t>::max());
}

TEST(RouterContract, HashTableAndVisionTokens) {
  RoutingSpec spec = test::method_spec(RoutingMethod::kHash, 4, 2);
  spec.scoring_func = ScoringFunc::kSqrtSoftplus;
  Router::Options options;
  options.spec = spec;
  Tensor table = Tensor::zeros(DType::kI32, {3, 2}).value();
  const Ids entries = {0, 1, 3, 2, 1, 1};
  std::copy(entries.begin(), entries.end(), table.as<std::int32_t>());
  options.hash_table = table.view();
  const Tensor vision_bias = [] {
    Tensor t = Tensor::zeros(DType::kF32, {4}).value();
    t.as<float>()[3] = 5;
    return t;
  }();
  options.vision_token_base = 100;
  options.vision_bias = vision_bias.view();
  const Router router = Router::create(options).value();
  // The same logits everywhere; only the tokens differ.
  Tensor l = Tensor::zeros(DType::kF32, {5, 4}).value();
  for (std::int64_t t = 0; t < 5; ++t) l.as<float>()[t * 4 + 2] = 1;
  const Tensor tokens = test::vector_i32({0, 2, 1, 104, 0});
  Router::Args args;
  args.router_logits = l.view();
  args.input_ids = tokens.view();
  const Routed r = test::run(router, args);
  EXPECT_EQ(r.ids, (Ids{0, 1, 1, 1, 3, 2, 3, 2, 0, 1}));
  EXPECT_GT(r.weights[7], r.weights[6]) << "the bias steers the choice and not the weight";
  // Outside [100, 105) and outside the table: refused, unless the row is padding.
  const Tensor beyond = test::vector_i32({0, 2, 1, 105, 0});
  args.input_ids = beyond.view();
  Tensor w = Tensor::zeros(DType::kF32, {5, 2}).value();
  Tensor ids = Tensor::zeros(DType::kI32, {5, 2}).value();
  args.topk_weights = w.view();
  args.topk_ids = ids.view();
  const Status s = router.select_experts(args);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(s.message().find("input_ids[3]: got 105, need 0 to 2"), std::string::npos)
      << s.message();
  const Tensor padding = mask({0, 0, 0, 1, 0});
  args.padding_mask = padding.view();
  EXPECT_TRUE(router.select_experts(args).ok());
}

TEST(RouterContract, HashedWeightsAreScoresOfTheStatedFunction) {
  const Tensor table = [] {
    Tensor t = Tensor::zeros(DType::kI32, {1, 2}).value();
    t.as<std::int32_t>()[0] = 2;
    return t;
  }();
  const Tensor l = test::matrix(1, {0, 9, 1});
  const Tensor tokens = test::vector_i32({0});
  Router::Args args;
  args.router_logits = l.view();
  args.input_ids = tokens.view();
  for (const auto func :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    Router::Options options;
    options.spec = test::method_spec(RoutingMethod::kHash, 3, 2);
    options.spec.scoring_func = func;
    options.hash_table = table.view();
    const Result<Router> router = Router::create(options);
    ASSERT_TRUE(router.ok()) << router.status().message();
    EXPECT_EQ(router.value().name(), "hash_" + std::string(scoring_func_name(func)));
    float scores[3];
    router::score_row(func, l.as<float>(), 3, scores);
    const Routed r = test::run(router.value(), args);
    EXPECT_EQ(r.ids, (Ids{2, 0}));
    EXPECT_EQ(r.weights, (Floats{scores[2], scores[0]})) << scoring_func_name(func);
  }
}

TEST(RouterContract, HashedTokensIgnoreTheBias) {
  RoutingSpec spec = test::method_spec(RoutingMethod::kHash, 4, 1);
  spec.scoring_func = ScoringFunc::kSqrtSoftplus;
  spec.has_correction_bias = true;
  Router::Options options;
  options.spec = spec;
  const Tensor table = Tensor::zeros(DType::kI32, {1, 1}).value();
  Tensor bias = Tensor::zeros(DType::kF32, {4}).value();
  bias.as<float>()[3] = 100;
  options.hash_table = table.view();
  options.correction_bias = bias.view();
  const Router router = Router::create(options).value();
  const Tensor l = test::matrix(1, {0, 0, 0, 9});
  const Tensor tokens = test::vector_i32({0});
  Router::Args args;
  args.router_logits = l.view();
  args.input_ids = tokens.view();
  EXPECT_EQ(test::run(router, args).ids, (Ids{0}));
}

TEST(RouterContract, ImpossibleGroupingFallsBackAndSaysSo) {
  std::vector<std::string> warnings;
  set_log_sink([&](std::string_view text) { warnings.emplace_back(text); });
  Rng rng(47);
  const Tensor l = test::random_normal(rng, DType::kF32, {20, 10}, 2.0);
  const Floats bias = {0, .1F, .2F, .3F, 0, -.1F, 0, .2F, 0, .1F};
  for (const std::int64_t groups : {4, 10, 16}) {  // does not divide; one expert each; too many
    for (const Floats& b : {Floats{}, bias}) {
      RoutingSpec grouped = test::grouped_spec(ScoringFunc::kSigmoid, 10, 3, true, groups, 2);
      grouped.routed_scaling_factor = 2.5;
      RoutingSpec plain = test::topk_spec(ScoringFunc::kSigmoid, 10, 3, true);
      plain.routed_scaling_factor = 2.5;
      Router::Options options;
      options.spec = grouped;
      const Routed r = test::route(options, l, b);
      options.spec = plain;
      const Routed want = test::route(options, l, b);
      EXPECT_EQ(r.ids, want.ids);
      EXPECT_EQ(r.weights, want.weights) << "scoring function and scale are honoured";
    }
  }
  set_log_sink({});
  ASSERT_EQ(warnings.size(), 3U);
  EXPECT_NE(warnings[0].find("4 groups of 10 experts"), std::string::npos) << warnings[0];
}

TEST(RouterContract, ZeroTokens) {
  const Router router = Router::create(options_for()).value();
  Router::Args args;
  args.router_logits = ConstTensorView(nullptr, DType::kBF16, {0, 16});
  args.topk_weights = TensorView(nullptr, DType::kF32, {0, 3});
  args.topk_ids = TensorView(nullptr, DType::kI64, {0, 3});
  EXPECT_TRUE(router.select_experts(args).ok());
}

TEST(RouterContract, CallbacksThatThrowBecomeAStatus) {
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kCustom, 4, 1);
  options.custom = [](ConstTensorView, ConstTensorView, bool, TensorView, TensorView) -> Status {
    throw std::runtime_error("no table");
  };
  const Tensor l = Tensor::zeros(DType::kF32, {2, 4}).value();
  Tensor w = Tensor::zeros(DType::kF32, {2, 1}).value();
  Tensor ids = Tensor::zeros(DType::kI32, {2, 1}).value();
  Router::Args args;
  args.router_logits = l.view();
  args.topk_weights = w.view();
  args.topk_ids = ids.view();
  Status s = Router::create(options)->select_experts(args);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(s.message().find("custom routing function: threw \"no table\""), std::string::npos)
      << s.message();
  options.custom = [](ConstTensorView, ConstTensorView, bool, TensorView, TensorView) {
    return Status(StatusCode::kDevice, "gone");
  };
  s = Router::create(options)->select_experts(args);
  EXPECT_EQ(s.code(), StatusCode::kDevice);
  EXPECT_EQ(s.message(), "custom routing function: gone");
  for (const std::int32_t bad : {4, -2}) {
    options.custom = [bad](ConstTensorView, ConstTensorView, bool, TensorView, TensorView out) {
      out.as<std::int32_t>()[0] = 0;
      out.as<std::int32_t>()[1] = bad;
      return Status();
    };
    s = Router::create(options)->select_experts(args);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(s.message().find("at [1, 0], need -1 to 3"), std::string::npos) << s.message();
  }
}

TEST(RouterContract, CustomFunctionReceivesItsArguments) {
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kCustom, 4, 2);
  options.spec.renormalize = true;
  const Tensor l = test::matrix(3, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  const Tensor x = Tensor::zeros(DType::kBF16, {3, 5}).value();
  options.custom = [&](ConstTensorView hidden, ConstTensorView logits, bool renormalize,
                       TensorView w, TensorView ids) {
    EXPECT_EQ(hidden.data, x.data());
    EXPECT_EQ(logits.data, l.data());
    EXPECT_TRUE(renormalize);
    std::fill_n(w.as<float>(), 6, 0.25F);
    std::fill_n(ids.as<std::int32_t>(), 6, 2);
    ids.as<std::int32_t>()[5] = -1;
    return Status();
  };
  Router::Args args;
  args.hidden_states = x.view();
  args.router_logits = l.view();
  const Routed r = test::run(Router::create(options).value(), args);
  EXPECT_EQ(r.ids, (Ids{2, 2, 2, 2, 2, -1}));
  EXPECT_EQ(r.weights, Floats(6, 0.25F));
}

TEST(RouterContract, Names) {
  const auto name = [](RoutingSpec spec, bool bias) {
    Router::Options options;
    options.spec = spec;
    const Tensor b = Tensor::zeros(DType::kF32, {8}).value();
    options.spec.has_correction_bias = bias;
    if (bias) options.correction_bias = b.view();
    return Router::create(options).value().name();
  };
  EXPECT_EQ(name(test::topk_spec(ScoringFunc::kSoftmax, 8, 2, true), false), "softmax_topk_renorm");
  EXPECT_EQ(name(test::topk_spec(ScoringFunc::kSigmoid, 8, 2, false), true), "sigmoid_bias_topk");
  EXPECT_EQ(name(test::grouped_spec(ScoringFunc::kSigmoid, 8, 2, false, 4, 2), true),
            "sigmoid_bias_grouped_topk");
  RoutingSpec best_two = test::grouped_spec(ScoringFunc::kSoftmax, 8, 2, true, 4, 2);
  best_two.group_by_best_two = true;
  EXPECT_EQ(name(best_two, false), "softmax_best_two_grouped_topk_renorm");
  EXPECT_EQ(name(best_two, true), "softmax_bias_grouped_topk_renorm");
  EXPECT_EQ(name(test::method_spec(RoutingMethod::kTopKSoftmax, 8, 2), false), "topk_softmax");
  EXPECT_EQ(name(test::method_spec(RoutingMethod::kLlama4, 8, 1), false), "topk_sigmoid");
  EXPECT_EQ(name(test::method_spec(RoutingMethod::kSparseMixer, 8, 2), false), "sparse_mixer");
  EXPECT_EQ(name(test::method_spec(RoutingMethod::kPNorm, 8, 2), false), "softmax_topk_p_norm");
}

}  // namespace
}  // namespace moesaic
