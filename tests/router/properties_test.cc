// Properties 1 to 9 and 11 of docs/spec/routing.md section 10 (10 is in contract_test.cc, 12 with
// the gate).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <string>

#include "router/router_fixture.h"
#include "router/scoring.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::Rng;
using test::route;
using test::Routed;
using test::with;
using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;

Floats random_bias(Rng& rng, std::int64_t n, double sd = 0.2) {
  Floats bias;
  for (std::int64_t e = 0; e < n; ++e) bias.push_back(static_cast<float>(sd * rng.normal()));
  return bias;
}

struct Method {
  std::string name;
  RoutingSpec spec;
  bool biased = false;
};

// Every real (not simulated, not custom, not hashed) method on E = 24 experts.
std::vector<Method> methods() {
  std::vector<Method> all;
  for (const auto& [name, scoring, biased, renorm] : test::scoring_cases()) {
    RoutingSpec spec = test::topk_spec(scoring, 24, 5, renorm);
    spec.routed_scaling_factor = 1.75;
    all.push_back({name, spec, biased});
    spec = test::grouped_spec(scoring, 24, 5, renorm, 6, 3);
    spec.routed_scaling_factor = 1.75;
    all.push_back({name + " grouped", spec, biased});
  }
  all.push_back({"topk_softmax", test::method_spec(RoutingMethod::kTopKSoftmax, 24, 5)});
  all.push_back({"llama4", test::method_spec(RoutingMethod::kLlama4, 24, 1)});
  all.push_back({"sparse_mixer", test::method_spec(RoutingMethod::kSparseMixer, 24, 2)});
  RoutingSpec norm = test::method_spec(RoutingMethod::kPNorm, 24, 5);
  norm.p_norm = 2;
  all.push_back({"p_norm", norm});
  return all;
}

TEST(RouterProperties, P1IdsAreDistinctAndWeightsFinite) {
  Rng rng(31);
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    const Tensor l = test::random_normal(rng, DType::kF32, {50, 24}, 3.0);
    const Routed r = route(with(method.spec), l, method.biased ? random_bias(rng, 24) : Floats{});
    for (std::int64_t t = 0; t < 50; ++t) {
      const Ids ids = r.row_ids(t);
      EXPECT_EQ(std::set<std::int32_t>(ids.begin(), ids.end()).size(), ids.size());
      EXPECT_GE(*std::min_element(ids.begin(), ids.end()), 0);
      EXPECT_LT(*std::max_element(ids.begin(), ids.end()), 24);
      for (const float w : r.row_weights(t)) EXPECT_TRUE(std::isfinite(w) && w >= 0) << w;
    }
  }
}

TEST(RouterProperties, P1VeryNegativeBiasesDoNotDuplicate) {
  for (const bool grouped : {false, true}) {
    const RoutingSpec spec = grouped ? test::grouped_spec(ScoringFunc::kSigmoid, 4, 4, false, 2, 2)
                                     : test::topk_spec(ScoringFunc::kSigmoid, 4, 4, false);
    const Routed r =
        route(with(spec), test::matrix(1, {0, 1, 2, 3}), {-1e30F, -3e38F, -20000, -9999});
    EXPECT_EQ(r.ids, (Ids{3, 2, 0, 1}));
    EXPECT_FLOAT_EQ(r.weights[3], router::sigmoid(1));
  }
}

TEST(RouterProperties, P2RenormalisedWeightsSumToTheScale) {
  Rng rng(32);
  for (const Method& method : methods()) {
    const bool sums = method.spec.renormalize || method.spec.method == RoutingMethod::kTopKSoftmax;
    if (!sums) continue;
    SCOPED_TRACE(method.name);
    const Tensor l = test::random_normal(rng, DType::kF32, {50, 24}, 3.0);
    const Routed r = route(with(method.spec), l, method.biased ? random_bias(rng, 24) : Floats{});
    for (std::int64_t t = 0; t < 50; ++t) {
      const Floats w = r.row_weights(t);
      EXPECT_NEAR(std::accumulate(w.begin(), w.end(), 0.0), method.spec.routed_scaling_factor,
                  1e-5);
    }
  }
}

TEST(RouterProperties, P3PermutingExpertsPermutesIds) {
  Rng rng(33);
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    const Tensor l = test::random_normal(rng, DType::kF32, {30, 24}, 2.0);
    const Floats bias = method.biased ? random_bias(rng, 24) : Floats{};
    // Groups must stay together: rotate by a whole group (4 experts).
    const std::int64_t shift = 8;
    Tensor moved = Tensor::zeros(DType::kF32, {30, 24}).value();
    Floats moved_bias(bias.size());
    for (std::int64_t t = 0; t < 30; ++t) {
      for (std::int64_t e = 0; e < 24; ++e) {
        moved.as<float>()[t * 24 + (e + shift) % 24] = l.as<float>()[t * 24 + e];
      }
    }
    for (std::size_t e = 0; e < bias.size(); ++e) moved_bias[(e + 8) % 24] = bias[e];
    const Routed a = route(with(method.spec), l, bias);
    const Routed b = route(with(method.spec), moved, moved_bias);
    Ids expected;
    for (const std::int32_t id : a.ids) expected.push_back((id + 8) % 24);
    EXPECT_EQ(b.ids, expected);
    // softmax sums in another order: the last bits may differ.
    for (std::size_t i = 0; i < a.weights.size(); ++i) {
      EXPECT_NEAR(b.weights[i], a.weights[i], 1e-5 * a.weights[i]);
    }
  }
}

TEST(RouterProperties, P4ConstantLogitShiftMattersToSigmoidOnly) {
  Rng rng(34);
  // Multiples of 1/8 and a shift by 1: both exact, so softmax must not move by one bit.
  Tensor l = test::random_integers(rng, DType::kF32, {20, 24}, 40);
  Tensor shifted = Tensor::zeros(DType::kF32, {20, 24}).value();
  for (std::int64_t i = 0; i < 20 * 24; ++i) {
    l.as<float>()[i] /= 8;
    shifted.as<float>()[i] = l.as<float>()[i] + 1;
  }
  for (const auto scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    const RoutingSpec spec = test::topk_spec(scoring, 24, 4, false);
    const Routed a = route(with(spec), l);
    const Routed b = route(with(spec), shifted);
    EXPECT_EQ(a.ids, b.ids);
    EXPECT_EQ(a.weights == b.weights, scoring == ScoringFunc::kSoftmax)
        << scoring_func_name(scoring);
  }
}

TEST(RouterProperties, P5ConstantBiasShiftChangesNothing) {
  Rng rng(35);
  const Tensor l = test::random_normal(rng, DType::kF32, {60, 24}, 2.0);
  const Floats bias = random_bias(rng, 24);
  Floats shifted = bias;
  for (float& b : shifted) b += 0.5F;
  for (const auto scoring : {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid}) {
    for (const RoutingSpec& spec :
         {test::topk_spec(scoring, 24, 5, true), test::grouped_spec(scoring, 24, 5, true, 6, 3)}) {
      const Routed a = route(with(spec), l, bias);
      const Routed b = route(with(spec), l, shifted);
      EXPECT_EQ(a.ids, b.ids);
      EXPECT_EQ(a.weights, b.weights);
    }
  }
}

TEST(RouterProperties, P6BiasedWeightsAreTheUnbiasedScoresBitForBit) {
  Rng rng(36);
  const Tensor l = test::random_normal(rng, DType::kF32, {40, 24}, 2.0);
  for (const auto scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    for (const RoutingSpec& spec : {test::topk_spec(scoring, 24, 5, false),
                                    test::grouped_spec(scoring, 24, 5, false, 6, 3)}) {
      // A bias large enough that (score + b) - b would have lost bits.
      const Routed r = route(with(spec), l, random_bias(rng, 24, 30.0));
      for (std::int64_t t = 0; t < 40; ++t) {
        float scores[24];
        router::score_row(scoring, l.as<float>() + t * 24, 24, scores);
        for (std::size_t j = 0; j < 5; ++j) {
          ASSERT_EQ(r.row_weights(t)[j], scores[r.row_ids(t)[j]]);
        }
      }
    }
  }
}

TEST(RouterProperties, P7GroupsAreRespected) {
  Rng rng(37);
  const Tensor l = test::random_normal(rng, DType::kF32, {60, 24}, 2.0);
  const Floats bias = random_bias(rng, 24);
  bool differs = false;
  for (const bool biased : {false, true}) {
    const Floats b = biased ? bias : Floats{};
    const auto grouped = [&](std::int64_t topk_group) {
      return route(with(test::grouped_spec(ScoringFunc::kSigmoid, 24, 4, true, 6, topk_group)), l,
                   b);
    };
    const Routed ungrouped = route(with(test::topk_spec(ScoringFunc::kSigmoid, 24, 4, true)), l, b);
    for (const std::int64_t topk_group : {1, 2, 3, 6}) {
      const Routed r = grouped(topk_group);
      for (std::int64_t t = 0; t < 60; ++t) {
        std::set<std::int32_t> used;
        for (const std::int32_t id : r.row_ids(t)) used.insert(id / 4);
        EXPECT_LE(used.size(), static_cast<std::size_t>(topk_group));
      }
      differs = differs || r.ids != ungrouped.ids;
      if (topk_group == 6) {
        EXPECT_EQ(r.ids, ungrouped.ids);
        EXPECT_EQ(r.weights, ungrouped.weights);
      }
    }
  }
  EXPECT_TRUE(differs) << "the grouping never restricted anything: nothing was tested";
}

TEST(RouterProperties, P9TiesGoToTheSmallerId) {
  for (const Method& method : methods()) {
    SCOPED_TRACE(method.name);
    const Tensor l = test::matrix(2, Floats(48, 0.75F));
    const Routed r = route(with(method.spec), l, method.biased ? Floats(24, 0.25F) : Floats{});
    Ids ascending(static_cast<std::size_t>(method.spec.top_k));
    std::iota(ascending.begin(), ascending.end(), 0);
    EXPECT_EQ(r.row_ids(0), ascending);
    EXPECT_EQ(r.row_ids(1), ascending);
  }
}

// The factor of an expert steers no choice and is the last one.
TEST(RouterProperties, ExpertScalesAreTheLastFactor) {
  Rng rng(39);
  const std::int64_t m = 60, experts = 24;
  const Tensor l = test::random_normal(rng, DType::kF32, {m, experts}, 2.0);
  const Floats bias = random_bias(rng, experts);
  const Tensor scale = test::random_normal(rng, DType::kF32, {experts});
  for (const auto& [name, scoring, biased, renorm] : test::scoring_cases()) {
    SCOPED_TRACE(name);
    RoutingSpec spec = test::topk_spec(scoring, experts, 5, renorm);
    spec.routed_scaling_factor = 1.75;
    const Routed plain = route(with(spec), l, biased ? bias : Floats());
    spec.has_expert_scale = true;
    Router::Options options = with(spec);
    options.expert_scale = scale.view();
    const Routed scaled = route(options, l, biased ? bias : Floats());
    EXPECT_EQ(scaled.ids, plain.ids);
    for (std::size_t i = 0; i < plain.ids.size(); ++i) {
      EXPECT_EQ(scaled.weights[i], plain.weights[i] * scale.as<float>()[plain.ids[i]]);
    }
  }
}

TEST(RouterProperties, P11ZeroExpertsLoseNoWeight) {
  Rng rng(38);
  const std::int64_t m = 50, real = 12, zero = 6, hidden = 7;
  const Floats bias = random_bias(rng, real + zero);
  const Tensor l = test::random_normal(rng, DType::kF32, {m, real + zero}, 1.5);
  for (const bool renorm : {false, true}) {
    RoutingSpec spec = test::topk_spec(ScoringFunc::kSoftmax, real, 4, renorm);
    spec.method = RoutingMethod::kZeroExpert;
    spec.num_zero_experts = zero;
    spec.has_correction_bias = true;
    spec.routed_scaling_factor = 6;
    Tensor bias_tensor = Tensor::zeros(DType::kF32, {real + zero}).value();
    std::copy(bias.begin(), bias.end(), bias_tensor.as<float>());
    Router::Options options = with(spec);
    options.correction_bias = bias_tensor.view();
    const Router router = Router::create(options).value();

    // The same selection without the zero-expert step.
    RoutingSpec plain = test::topk_spec(ScoringFunc::kSoftmax, real + zero, 4, renorm);
    plain.routed_scaling_factor = 6;
    const Routed all = route(with(plain), l, bias);

    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Tensor x = test::random_normal(rng, dtype, {m, hidden});
      Tensor out = Tensor::uninitialized(dtype, {m, hidden}).value();
      test::poison(out.view());
      Router::Args args;
      args.hidden_states = x.view();
      args.router_logits = l.view();
      args.zero_expert_output = out.view();
      const Routed r = test::run(router, args);
      const auto x64 = test::to_doubles(x.view()), out64 = test::to_doubles(out.view());
      int zero_slots = 0;
      for (std::int64_t t = 0; t < m; ++t) {
        float z = 0;
        for (std::size_t j = 0; j < 4; ++j) {
          const std::int32_t id = all.row_ids(t)[j];
          const bool is_zero = id >= real;
          zero_slots += is_zero;
          if (is_zero) z += all.row_weights(t)[j];
          EXPECT_EQ(r.row_ids(t)[j], is_zero ? 0 : id);
          EXPECT_EQ(r.row_weights(t)[j], is_zero ? 0 : all.row_weights(t)[j]);
        }
        for (std::int64_t i = t * hidden; i < (t + 1) * hidden; ++i) {
          const double want = static_cast<double>(z) * x64[static_cast<std::size_t>(i)];
          const double ulp = dtype == DType::kF32   ? 0x1p-23
                             : dtype == DType::kF16 ? 0x1p-10
                                                    : 0x1p-7;
          EXPECT_NEAR(out64[static_cast<std::size_t>(i)], want, std::abs(want) * ulp + 1e-7);
        }
      }
      EXPECT_GT(zero_slots, 10);
    }
  }
}

}  // namespace
}  // namespace moesaic
