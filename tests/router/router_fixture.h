// Short ways to build a router, run it on poisoned outputs and read the result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moesaic/router.h"
#include "support/random.h"

namespace moesaic::test {

struct Routed {
  std::int64_t slots = 0;
  std::vector<float> weights;
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> row_ids(std::int64_t t) const;
  std::vector<float> row_weights(std::int64_t t) const;
};

// [rows, columns] F32 from values in order.
Tensor matrix(std::int64_t rows, const std::vector<float>& values);
Tensor vector_i32(const std::vector<std::int32_t>& values);

RoutingSpec topk_spec(ScoringFunc scoring, std::int64_t experts, std::int64_t k, bool renormalize);
RoutingSpec grouped_spec(ScoringFunc scoring, std::int64_t experts, std::int64_t k,
                         bool renormalize, std::int64_t groups, std::int64_t topk_group);
RoutingSpec method_spec(RoutingMethod method, std::int64_t experts, std::int64_t k);

// Scoring functions with and without a correction bias and renormalisation: all of top-k's
// variants.
struct ScoringCase {
  std::string name;
  ScoringFunc scoring;
  bool biased, renormalize;
};
std::vector<ScoringCase> scoring_cases();

// Creates and runs; fails the test and returns nothing useful when either is refused. A bias given
// sets has_correction_bias.
inline Router::Options with(const RoutingSpec& spec) {
  Router::Options o;
  o.spec = spec;
  return o;
}
Routed route(Router::Options options, const Tensor& logits, const std::vector<float>& bias = {});
Routed run(const Router& router, Router::Args args);
Routed run(const Router& router, const Tensor& logits);

// EXPECT that values agree to the digits that the worked examples print.
void expect_digits(const std::vector<float>& got, const std::vector<double>& want);

}  // namespace moesaic::test
