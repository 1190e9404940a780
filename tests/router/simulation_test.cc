// Simulated routing: distributions, reproducibility, registered strategies.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "moesaic/interop/own_layer.h"
#include "router/router_fixture.h"

namespace moesaic {
namespace {

using test::Routed;

Routed simulate(const std::string& strategy, std::int64_t m, std::int64_t experts, std::int64_t k,
                std::uint64_t seed = 5) {
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kSimulated, experts, k);
  options.simulation_strategy = strategy;
  options.seed = seed;
  const Tensor logits = Tensor::zeros(DType::kBF16, {m, experts}).value();
  return test::run(Router::create(options).value(), logits);
}

TEST(RouterSimulation, UniformIdsWithReplacementAndUnitWeights) {
  const std::int64_t m = 4000, e = 10, k = 5;
  const Routed r = simulate("uniform_random", m, e, k);
  std::vector<double> count(10, 0);
  std::int64_t rows_with_duplicates = 0;
  for (std::int64_t t = 0; t < m; ++t) {
    auto ids = r.row_ids(t);
    for (const auto id : ids) {
      ASSERT_TRUE(id >= 0 && id < e);
      count[static_cast<std::size_t>(id)] += 1;
    }
    std::sort(ids.begin(), ids.end());
    rows_with_duplicates += std::adjacent_find(ids.begin(), ids.end()) != ids.end();
  }
  for (const float w : r.weights) ASSERT_EQ(w, 1.0F);
  // Binomial(20000, 0.1): mean 2000, sd 42; six sd.
  for (const double c : count) EXPECT_NEAR(c, 2000, 255);
  // P(five draws of ten distinct) = 0.3024.
  EXPECT_NEAR(static_cast<double>(rows_with_duplicates) / 4000, 1 - 0.3024, 0.05);
}

TEST(RouterSimulation, NormalRoutingPrefersTheMiddleAndSumsToOne) {
  const std::int64_t m = 4000, e = 10, k = 4;
  const Routed r = simulate("normal_routing", m, e, k);
  std::vector<double> count(10, 0);
  for (std::int64_t t = 0; t < m; ++t) {
    for (const auto id : r.row_ids(t)) {
      ASSERT_TRUE(id >= 0 && id < e);
      count[static_cast<std::size_t>(id)] += 1;
    }
    const auto w = r.row_weights(t);
    EXPECT_NEAR(std::accumulate(w.begin(), w.end(), 0.0), 1.0, 1e-5);
    EXPECT_GE(*std::min_element(w.begin(), w.end()), 0.0F);
  }
  // P(id = i) = Phi(logit((i + 1) / 10)) - Phi(logit(i / 10)).
  const auto phi = [](double p) {
    if (p <= 0) return 0.0;
    if (p >= 1) return 1.0;
    return 0.5 * std::erfc(-std::log(p / (1 - p)) / std::sqrt(2.0));
  };
  for (std::size_t i = 0; i < 10; ++i) {
    const double p = phi(0.1 * static_cast<double>(i + 1)) - phi(0.1 * static_cast<double>(i));
    EXPECT_NEAR(count[i], 16000 * p, 6 * std::sqrt(16000 * p * (1 - p))) << i;
  }
}

TEST(RouterSimulation, ReproducibleAndSeeded) {
  const Routed a = simulate("normal_routing", 50, 32, 4), b = simulate("normal_routing", 50, 32, 4);
  EXPECT_EQ(a.ids, b.ids);
  EXPECT_EQ(a.weights, b.weights);
  EXPECT_NE(a.ids, simulate("normal_routing", 50, 32, 4, 6).ids);
  // The first rows of a longer batch are the same rows.
  const Routed longer = simulate("normal_routing", 80, 32, 4);
  EXPECT_TRUE(std::equal(a.ids.begin(), a.ids.end(), longer.ids.begin()));
  EXPECT_NE(a.row_ids(0), a.row_ids(1));
}

TEST(RouterSimulation, RegisteredStrategies) {
  EXPECT_EQ(register_simulation_strategy("", {}).code(), StatusCode::kInvalidArgument);
  const auto all_to = [](std::int32_t target) {
    return [target](std::uint64_t, std::int64_t, TensorView w, TensorView ids) {
      const std::int64_t n = ids.shape.num_elements().value();
      std::fill_n(w.as<float>(), n, 0.5F);
      std::fill_n(ids.as<std::int32_t>(), n, target);
      return Status();
    };
  };
  ASSERT_TRUE(register_simulation_strategy("all_to_three", all_to(3)).ok());
  const Status again = register_simulation_strategy("all_to_three", all_to(2));
  EXPECT_EQ(again.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(again.message().find("'all_to_three' is registered already"), std::string::npos);
  EXPECT_EQ(register_simulation_strategy("uniform_random", all_to(2)).code(),
            StatusCode::kInvalidArgument);
  const Routed r = simulate("all_to_three", 3, 8, 2);
  EXPECT_EQ(r.ids, std::vector<std::int32_t>(6, 3));
  EXPECT_EQ(r.weights, std::vector<float>(6, 0.5F));

  // A strategy that leaves the experts is caught.
  ASSERT_TRUE(register_simulation_strategy("all_to_nine", all_to(9)).ok());
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kSimulated, 8, 2);
  options.simulation_strategy = "all_to_nine";
  const Router router = Router::create(options).value();
  EXPECT_EQ(router.name(), "simulated_all_to_nine");
  const Tensor logits = Tensor::zeros(DType::kF32, {1, 8}).value();
  Tensor w = Tensor::zeros(DType::kF32, {1, 2}).value();
  Tensor ids = Tensor::zeros(DType::kI32, {1, 2}).value();
  Router::Args args;
  args.router_logits = logits.view();
  args.topk_weights = w.view();
  args.topk_ids = ids.view();
  const Status s = router.select_experts(args);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(s.message().find("got id 9 at [0, 0], need 0 to 7"), std::string::npos) << s.message();

  options.simulation_strategy = "zipf";
  const auto unknown = Router::create(options);
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), StatusCode::kNotFound);
  EXPECT_NE(unknown.status().message().find("got 'zipf', need one of"), std::string::npos);
  EXPECT_NE(unknown.status().message().find("uniform_random"), std::string::npos);
}

}  // namespace
}  // namespace moesaic
