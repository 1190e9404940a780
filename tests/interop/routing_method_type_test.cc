// Factory priority and RoutingMethodType, docs/spec/routing.md sections 2.1 and 2.2.
#include <gtest/gtest.h>

#include "moesaic/interop/routing.h"
#include "router/router_fixture.h"

namespace moesaic {
namespace {

using Type = RoutingMethodType;
using enum ScoringFunc;

TEST(RoutingMethodType, Numbers) {
  EXPECT_EQ(static_cast<int>(Type::kDefault), 0);
  EXPECT_EQ(static_cast<int>(Type::kRenormalize), 1);
  EXPECT_EQ(static_cast<int>(Type::kDeepSeekV3), 2);
  EXPECT_EQ(static_cast<int>(Type::kLlama4), 3);
  EXPECT_EQ(static_cast<int>(Type::kRenormalizeNaive), 4);
  EXPECT_EQ(static_cast<int>(Type::kTopK), 5);
  EXPECT_EQ(static_cast<int>(Type::kSigmoidRenorm), 6);
  EXPECT_EQ(static_cast<int>(Type::kMiniMax2), 7);
  EXPECT_EQ(static_cast<int>(Type::kSigmoid), 8);
  EXPECT_EQ(static_cast<int>(Type::kUnspecified), 9);
  EXPECT_EQ(static_cast<int>(Type::kDeepseekV4), 100);
  EXPECT_EQ(static_cast<int>(Type::kCustom), 101);
  EXPECT_EQ(static_cast<int>(Type::kSimulated), 102);
  EXPECT_EQ(routing_method_type_name(Type::kDeepSeekV3), "DeepSeekV3");
}

TEST(RoutingMethodType, Derivation) {
  struct Row {
    ScoringFunc scoring;
    bool renorm;
    std::optional<std::int64_t> groups;
    bool bias;
    std::optional<double> scale;
    Type want;
  };
  for (const Row& r : {
           Row{kSqrtSoftplus, true, {}, false, {}, Type::kDeepseekV4},
           Row{kSqrtSoftplus, true, 4, true, 2.5, Type::kDeepseekV4},
           Row{kSqrtSoftplus, false, {}, true, {}, Type::kUnspecified},
           Row{kSigmoid, true, 8, true, 2.5, Type::kDeepSeekV3},
           Row{kSigmoid, true, 1, true, 2.827, Type::kDeepSeekV3},
           Row{kSigmoid, true, {}, true, {}, Type::kMiniMax2},
           Row{kSigmoid, true, 0, true, 1.0, Type::kMiniMax2},
           Row{kSigmoid, true, {}, true, 2.5, Type::kUnspecified},
           Row{kSigmoid, false, 8, true, 1.0, Type::kUnspecified},
           Row{kSigmoid, false, {}, true, {}, Type::kUnspecified},
           Row{kSoftmax, true, 8, true, 1.0, Type::kUnspecified},
           Row{kSoftmax, false, {}, true, {}, Type::kUnspecified},
           Row{kSigmoid, true, {}, false, {}, Type::kSigmoidRenorm},
           Row{kSigmoid, false, {}, false, 3.0, Type::kSigmoid},
           Row{kSoftmax, true, 8, false, {}, Type::kRenormalizeNaive},
           Row{kSoftmax, false, {}, false, {}, Type::kDefault},
       }) {
    for (const std::int64_t k : {1, 8}) {  // k is not consulted
      EXPECT_EQ(derive_routing_method_type(r.scoring, k, r.renorm, r.groups, r.bias, r.scale),
                r.want)
          << scoring_func_name(r.scoring) << " renorm " << r.renorm << " bias " << r.bias;
    }
  }
}

TEST(RoutingMethodType, OfOurSpecs) {
  const auto of = [](RoutingSpec spec, bool bias = false, double scale = 1, bool output = false) {
    spec.has_correction_bias = bias;
    spec.routed_scaling_factor = scale;
    spec.scale_on_output = output;
    return routing_method_type(spec);
  };
  EXPECT_EQ(of(test::topk_spec(kSoftmax, 8, 2, true)), Type::kRenormalizeNaive);
  EXPECT_EQ(of(test::topk_spec(kSigmoid, 8, 2, true), true), Type::kMiniMax2);
  EXPECT_EQ(of(test::topk_spec(kSigmoid, 8, 2, true), true, 2.5), Type::kUnspecified);
  EXPECT_EQ(of(test::topk_spec(kSigmoid, 8, 2, true), true, 2.5, true), Type::kMiniMax2)
      << "with scaling on the output the router is built with factor 1";
  EXPECT_EQ(of(test::grouped_spec(kSigmoid, 8, 2, true, 1, 1), true, 2.5), Type::kDeepSeekV3);
  EXPECT_EQ(of(test::method_spec(RoutingMethod::kTopKSoftmax, 8, 2)), Type::kRenormalize);
  EXPECT_EQ(of(test::method_spec(RoutingMethod::kLlama4, 8, 1)), Type::kLlama4);
  EXPECT_EQ(of(test::method_spec(RoutingMethod::kZeroExpert, 8, 2), true), Type::kUnspecified);
  EXPECT_EQ(of(test::method_spec(RoutingMethod::kCustom, 8, 2)), Type::kCustom);
  EXPECT_EQ(of(test::method_spec(RoutingMethod::kSparseMixer, 8, 2)), Type::kCustom);
  EXPECT_EQ(of(test::method_spec(RoutingMethod::kSimulated, 8, 2)), Type::kSimulated);
  RoutingSpec scaled = test::topk_spec(kSoftmax, 8, 2, true);
  scaled.has_expert_scale = true;
  EXPECT_EQ(of(scaled), Type::kUnspecified) << "a kernel of a type would forget the factor";
  RoutingSpec hash = test::method_spec(RoutingMethod::kHash, 8, 2);
  hash.scoring_func = kSqrtSoftplus;
  hash.renormalize = true;
  EXPECT_EQ(of(hash, false, 1.5), Type::kDeepseekV4);
  hash.scoring_func = kSigmoid;
  EXPECT_EQ(of(hash), Type::kUnspecified) << "a kernel of a type would choose by score";
}

RouterFactoryInputs everything() {
  RouterFactoryInputs in;
  in.simulation_strategy = true;
  in.zero_expert_type = true;
  in.use_grouped_topk = true;
  in.num_expert_group = 8;
  in.topk_group = 4;
  in.has_bias = true;
  in.has_hash_table = true;
  in.scoring = kSigmoid;
  in.renormalize = true;
  return in;
}

TEST(RouterFactory, Priority) {
  RouterFactoryInputs in = everything();
  EXPECT_EQ(choose_router(in).value(), RouterKind::kSimulator);
  in.simulation_strategy = false;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kZeroExpert);
  in.zero_expert_type = false;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kGrouped);
  in.use_grouped_topk = false;
  in.custom_routing_function = true;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kCustom);
  in.custom_routing_function = false;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kBiasedTopK);
  in.has_bias = false;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kBiasedTopK) << "a hash table alone suffices";
  in.has_hash_table = false;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kTopK);
}

TEST(RouterFactory, OneGroupOfUnspecifiedTypeIsDropped) {
  RouterFactoryInputs in = everything();
  in.simulation_strategy = in.zero_expert_type = false;
  in.scoring = kSoftmax;  // biased softmax: Unspecified
  EXPECT_EQ(choose_router(in).value(), RouterKind::kGrouped);
  in.num_expert_group = 1;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kGrouped) << "topk_group is still above 1";
  in.topk_group = 1;
  EXPECT_EQ(choose_router(in).value(), RouterKind::kBiasedTopK);
  in.scoring = kSigmoid;  // DeepSeekV3: stays grouped
  EXPECT_EQ(choose_router(in).value(), RouterKind::kGrouped);
}

TEST(RouterFactory, Refusals) {
  const auto refused = [](const RouterFactoryInputs& in, const std::string& words) {
    const auto result = choose_router(in);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().message().find(words), std::string::npos)
        << result.status().message();
  };
  RouterFactoryInputs in = everything();
  in.simulation_strategy = false;
  in.has_bias = false;
  refused(in, "correction_bias: absent with zero experts");
  in = everything();
  in.simulation_strategy = in.zero_expert_type = false;
  in.custom_routing_function = true;
  refused(in, "custom_routing_function: given with grouped");
  in.custom_routing_function = false;
  in.topk_group.reset();
  refused(in, "num_expert_group, topk_group: unset");
  in = {};
  in.scoring = kSqrtSoftplus;
  refused(in, "scoring_func: got sqrtsoftplus");
}

}  // namespace
}  // namespace moesaic
