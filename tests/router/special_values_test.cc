// NaN and infinite logits, per method; extreme and degenerate rows.
#include "support/special_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "router/router_fixture.h"

namespace moesaic {
namespace {

using test::kInf;
using test::matrix;
using test::route;
using test::Routed;
using test::with;
using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;

const float kNaN = std::numeric_limits<float>::quiet_NaN();

// Property 8.
TEST(RouterSpecial, NaNRowGivesFirstIdsAndZeroWeights) {
  const Tensor l = matrix(1, Floats(6, kNaN));
  for (const auto scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    for (const bool renorm : {false, true}) {
      for (const Floats& bias : {Floats{}, Floats(6, -2.0F)}) {
        RoutingSpec spec = test::topk_spec(scoring, 6, 3, renorm);
        spec.routed_scaling_factor = 2;
        const Routed r = route(with(spec), l, bias);
        EXPECT_EQ(r.ids, (Ids{0, 1, 2}));
        EXPECT_EQ(r.weights, (Floats{0, 0, 0}));
      }
    }
  }
  for (const auto method : {RoutingMethod::kTopKSoftmax, RoutingMethod::kPNorm,
                            RoutingMethod::kSparseMixer, RoutingMethod::kLlama4}) {
    const Routed r = route(with(test::method_spec(method, 6, 2)), l);
    EXPECT_EQ(r.ids, (Ids{0, 1})) << routing_method_name(method);
    EXPECT_EQ(r.weights, (Floats{0, 0})) << routing_method_name(method);
  }
}

// Property 8, grouped: 1/k each, neither renormalised nor scaled.
TEST(RouterSpecial, GroupedRowWithoutCandidatesGivesEqualWeights) {
  for (const auto scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    for (const bool renorm : {false, true}) {
      for (const bool biased : {false, true}) {
        RoutingSpec spec = test::grouped_spec(scoring, 8, 4, renorm, 4, 2);
        spec.routed_scaling_factor = 2.5;
        const Routed r = route(with(spec), matrix(1, Floats(8, kNaN)),
                               biased ? Floats{0, 1, 2, 3, 4, 5, 6, 7} : Floats{});
        EXPECT_EQ(r.ids, (Ids{0, 1, 2, 3}));
        EXPECT_EQ(r.weights, (Floats{.25F, .25F, .25F, .25F}));
      }
    }
  }
}

TEST(RouterSpecial, GroupedNeedsOneGroupPerPlace) {
  // Without a bias one finite logit makes a group; with one it takes two.
  const Tensor l = matrix(1, {kNaN, 1, kNaN, kInf, 2, 3, -kInf, kNaN});
  RoutingSpec spec = test::grouped_spec(ScoringFunc::kSigmoid, 8, 2, false, 4, 2);
  Routed r = route(with(spec), l);
  EXPECT_EQ(r.ids, (Ids{5, 4})) << "groups 2 and 0 are kept; +inf is no candidate";
  r = route(with(spec), l, Floats(8, 0.0F));
  EXPECT_EQ(r.ids, (Ids{0, 1})) << "only one group has two candidates: the row falls back";
  EXPECT_EQ(r.weights, (Floats{.5F, .5F}));
  // More slots than candidates: the others follow, distinct, inside the kept groups, weight 0.
  spec.top_k = 4;
  r = route(with(spec), l);
  EXPECT_EQ(r.ids, (Ids{5, 4, 1, 0}));
  EXPECT_EQ(r.weights[3], 0.0F);
}

TEST(RouterSpecial, GroupedAllZeroScoresGiveZeroNotNaN) {
  // sigmoid underflows to 0 for every expert; the denominator 1e-20 + 0 keeps the weights 0.
  const Routed r = route(with(test::grouped_spec(ScoringFunc::kSigmoid, 8, 2, true, 4, 2)),
                         matrix(1, Floats(8, -200.0F)), Floats(8, 0.5F));
  EXPECT_EQ(r.weights, (Floats{0, 0}));
}

TEST(RouterSpecial, UngroupedAllZeroScoresDivideByOne) {
  for (const Floats& bias : {Floats{}, Floats(4, 1.0F)}) {
    const Routed r = route(with(test::topk_spec(ScoringFunc::kSigmoid, 4, 2, true)),
                           matrix(1, Floats(4, -200.0F)), bias);
    EXPECT_EQ(r.ids, (Ids{0, 1}));
    EXPECT_EQ(r.weights, (Floats{0, 0}));
  }
}

TEST(RouterSpecial, NonFiniteScoresCountAsZero) {
  // softmax: one NaN or +inf spoils the row; -inf is a masked expert.
  const RoutingSpec softmax = test::topk_spec(ScoringFunc::kSoftmax, 4, 2, false);
  for (const float bad : {kNaN, kInf}) {
    const Routed r = route(with(softmax), matrix(1, {1, bad, 2, 3}));
    EXPECT_EQ(r.ids, (Ids{0, 1}));
    EXPECT_EQ(r.weights, (Floats{0, 0}));
  }
  Routed r = route(with(softmax), matrix(1, {-kInf, 5, -kInf, 5}));
  EXPECT_EQ(r.ids, (Ids{1, 3}));
  EXPECT_EQ(r.weights, (Floats{.5F, .5F}));
  // sigmoid: each logit for itself.
  const RoutingSpec sigmoid = test::topk_spec(ScoringFunc::kSigmoid, 4, 3, false);
  r = route(with(sigmoid), matrix(1, {kNaN, kInf, -kInf, 0}));
  EXPECT_EQ(r.ids, (Ids{1, 3, 0}));
  EXPECT_EQ(r.weights, (Floats{1, .5F, 0}));
  // sqrtsoftplus: NaN counts as 0, +inf stays what it is.
  const RoutingSpec softplus = test::topk_spec(ScoringFunc::kSqrtSoftplus, 4, 2, false);
  r = route(with(softplus), matrix(1, {kNaN, 9, kInf, 0}));
  EXPECT_EQ(r.ids, (Ids{2, 1}));
  EXPECT_EQ(r.weights[0], kInf);
}

TEST(RouterSpecial, RawLogitMethodsLetNumbersBeatNaN) {
  Routed r = route(with(test::method_spec(RoutingMethod::kTopKSoftmax, 4, 3)),
                   matrix(1, {kNaN, 1, -kInf, 1}));
  EXPECT_EQ(r.ids, (Ids{1, 3, 0}));
  EXPECT_EQ(r.weights, (Floats{.5F, .5F, 0}));
  r = route(with(test::method_spec(RoutingMethod::kLlama4, 3, 2)), matrix(1, {kNaN, -kInf, 0}));
  EXPECT_EQ(r.ids, (Ids{2, 0}));
  EXPECT_EQ(r.weights, (Floats{.5F, 0}));
  r = route(with(test::method_spec(RoutingMethod::kSparseMixer, 4, 2)),
            matrix(1, {kNaN, 2, -kInf, kNaN}));
  EXPECT_EQ(r.ids, (Ids{1, 2}));
  EXPECT_EQ(r.weights, (Floats{1, 0}));
}

TEST(RouterSpecial, SparseMixerAtZeroAndBelow) {
  // max 0 and another 0: 0 / 0 survives. Negative maxima use |l_j| as the divisor.
  Routed r =
      route(with(test::method_spec(RoutingMethod::kSparseMixer, 3, 2)), matrix(1, {0, 0, -1}));
  EXPECT_EQ(r.ids, (Ids{0, 1}));
  EXPECT_EQ(r.weights, (Floats{.5F, 1.0F}));
  r = route(with(test::method_spec(RoutingMethod::kSparseMixer, 3, 2)),
            matrix(1, {-1, -1.01F, -3}));
  EXPECT_EQ(r.ids, (Ids{0, 1}));
  EXPECT_NEAR(r.weights[0], 1 / (1 + std::exp(-.01)), 1e-6);
  EXPECT_EQ(r.weights[1], 1.0F);
  // The divisor is max(|l_j|, m), not |m|: 2.03 / 102.03 is below 2 eps = 0.02, 2.03 / 100 above.
  r = route(with(test::method_spec(RoutingMethod::kSparseMixer, 2, 2)),
            matrix(1, {-100, -102.03F}));
  EXPECT_NEAR(r.weights[0], 1 / (1 + std::exp(-2.03)), 1e-5);
}

TEST(RouterSpecial, RenormFloorBoundsTheDenominator) {
  RoutingSpec spec = test::topk_spec(ScoringFunc::kSoftmax, 4, 1, true);
  spec.renorm_floor = 0.8;
  // The best score is 1/4: below the floor, so the weight is 0.25 / 0.8.
  EXPECT_FLOAT_EQ(route(with(spec), matrix(1, Floats(4, 3.0F))).weights[0], 0.25F / 0.8F);
  spec.renorm_floor = 1e-12;
  EXPECT_EQ(route(with(spec), matrix(1, Floats(4, 3.0F))).weights[0], 1.0F);
}

TEST(RouterSpecial, ExtremeFiniteLogits) {
  const Tensor l = matrix(1, {3e38F, -3e38F, 1e30F, 0});
  Routed r = route(with(test::topk_spec(ScoringFunc::kSoftmax, 4, 2, true)), l);
  EXPECT_EQ(r.ids, (Ids{0, 1})) << "the others underflow to 0 and tie";
  EXPECT_EQ(r.weights, (Floats{1, 0}));
  r = route(with(test::method_spec(RoutingMethod::kTopKSoftmax, 4, 2)), l);
  EXPECT_EQ(r.ids, (Ids{0, 2}));
  EXPECT_EQ(r.weights, (Floats{1, 0}));
  r = route(with(test::topk_spec(ScoringFunc::kSigmoid, 4, 4, false)), l);
  EXPECT_EQ(r.ids, (Ids{0, 2, 3, 1}));
  EXPECT_EQ(r.weights, (Floats{1, 1, .5F, 0}));
}

}  // namespace
}  // namespace moesaic
