// Formats whose intermediate has one scale per row, step by step: what GEMM1 left, the codes that
// were made of it, and what GEMM2 made of the codes. A sum that lands on the other side of a
// rounding boundary moves a code, and where a row is short one code is a visible part of the result:
// no bound of a whole expert tells that from an error. Each step by itself has a tight one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "case_on_device.h"
#include "experts/sm90/experts_plan.h"
#include "numerics/float_codec.h"
#include "support/metrics.h"
#include "support/moe_oracle.h"

namespace moesaic {
namespace {

using test::OnDevice;
using test::StandardCase;

template <class T>
std::vector<T> values_at(const void* device, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  EXPECT_EQ(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return host;
}

// What a run left in the workspace.
struct Intermediate {
  std::int64_t row_bytes = 0;
  std::vector<std::int32_t> row_of_pair;
  std::vector<std::uint16_t> before;  // [pairs, I] bf16
  std::vector<std::uint8_t> codes;    // [pairs, row_bytes]
  std::vector<float> scale;           // [pairs]

  Intermediate(const OnDevice& d, const MoeProblem& problem) {
    const MoeProblem fitted = cuda::fitted_problem(problem).value();
    const cuda::ExpertsPlan plan = cuda::make_experts_plan(fitted).value();
    EXPECT_TRUE(plan.quantizes_late());
    Arena arena({d.workspace.as<std::byte>(), static_cast<std::size_t>(d.workspace_bytes)});
    const auto w = cuda::ExpertsWorkspace::carve(fitted, plan, d.tokens, 0, arena);
    const std::int64_t pairs = d.tokens * problem.top_k;
    row_bytes = fitted.intermediate_size;
    row_of_pair = values_at<std::int32_t>(w.row_of_pair, pairs);
    before = values_at<std::uint16_t>(w.inner_bf16, pairs * row_bytes);
    codes = values_at<std::uint8_t>(w.inner, pairs * row_bytes);
    scale = values_at<float>(w.inner_scale, pairs);
  }
  double value_before(std::int64_t row, std::int64_t i) const {
    return static_cast<double>(
        f32_from_bf16(before[static_cast<std::size_t>(row * row_bytes + i)]));
  }
  double operand(bool int8, std::int64_t row, std::int64_t i) const {
    const std::uint8_t code = codes[static_cast<std::size_t>(row * row_bytes + i)];
    const double v = int8 ? static_cast<double>(static_cast<std::int8_t>(code))
                          : static_cast<double>(f32_from_e4m3(code));
    return v * static_cast<double>(scale[static_cast<std::size_t>(row)]);
  }
};

// Values of the intermediate that are right: the activation of sums that are off by `part` of what was
// added up, about the size of the row's sums and of this one. Sums of int8 products are exact up to
// their factors. An addition of 32 e4m3 products keeps 13 fraction bits of the largest term and cuts
// off what the others have below them; with eight in front of a promotion that is 2^-12 of the sum
// (root mean square, measured: docs/accuracy.md), of which eight times are allowed.
struct Nearby {
  std::vector<double> least, most;

  Nearby(const test::OracleExpert& expert, bool gated, const std::vector<double>& sums,
         double part) {
    double square = 0;
    for (const double v : sums) square += v * v;
    const double rms = std::sqrt(square / static_cast<double>(sums.size()));
    least = most = expert.activated(sums);
    const std::size_t half = sums.size() / (gated ? 2 : 1);
    for (const double gate : {-part, part}) {
      for (const double up : {-part, part}) {
        std::vector<double> moved = sums;
        for (std::size_t i = 0; i < moved.size(); ++i) {
          moved[i] += (i < half ? gate : up) * (rms + std::abs(sums[i]));
        }
        const std::vector<double> y = expert.activated(moved);
        for (std::size_t i = 0; i < y.size(); ++i) {
          least[i] = std::min(least[i], y[i]);
          most[i] = std::max(most[i], y[i]);
        }
      }
    }
  }
  // bf16, rounded to nearest; the activation's own error, below 2^-20, is in the slack.
  bool rounds_to(double value, std::size_t i) const {
    const double slack = 0x1.01p-8 * std::max(std::abs(least[i]), std::abs(most[i]));
    return value >= least[i] - slack && value <= most[i] + slack;
  }
};

void expect_each_step(const StandardCase& c, const char* quant) {
  const MoeProblem& p = c.problem;
  const OnDevice d(c, test::create_on_device(c));
  const Tensor got = d.run();
  const Intermediate inner(d, p);
  const bool int8 = p.quant.weight.dtype == DType::kI8;
  const std::int64_t hidden = p.hidden_size, size = p.intermediate_size;
  std::vector<double> want(static_cast<std::size_t>(d.tokens * hidden));
  std::int64_t other_codes = 0, far = 0;
  const StackedExpertWeights weights = c.weights.view();
  std::map<std::int64_t, test::OracleExpert> experts;
  for (std::int64_t pair = 0; pair < d.tokens * p.top_k; ++pair) {
    const std::int64_t token = pair / p.top_k;
    const std::int64_t row = inner.row_of_pair[static_cast<std::size_t>(pair)];
    const std::int32_t e = c.routing.ids.as<std::int32_t>()[pair];
    if (e < 0) continue;
    ASSERT_GE(row, 0);
    const auto x = test::oracle_row(c.hidden_states.view(), token * hidden, hidden);
    const test::OracleExpert& expert =
        experts.try_emplace(e, p, weights, e, test::OracleOptions{true}).first->second;
    const std::vector<double> sums = expert.first(x, 1.0);
    const Nearby near(expert, test::oracle_is_gated(p), sums, int8 ? 0x1p-20 : 0x1p-9);
    std::vector<double> before(static_cast<std::size_t>(size)), operand(before.size());
    for (std::int64_t i = 0; i < size; ++i) {
      const auto at = static_cast<std::size_t>(i);
      before[at] = inner.value_before(row, i);
      operand[at] = inner.operand(int8, row, i);
      far += near.rounds_to(before[at], at) ? 0 : 1;
    }
    // Codes and scale of exactly these values.
    const std::vector<double> made = expert.second_operand(before);
    for (std::size_t i = 0; i < made.size(); ++i) other_codes += made[i] == operand[i] ? 0 : 1;
    // And the sums of exactly these codes.
    const std::vector<double> y = expert.second(operand);
    const auto weight = static_cast<double>(c.routing.weights.as<float>()[pair]);
    for (std::int64_t i = 0; i < hidden; ++i) {
      want[static_cast<std::size_t>(token * hidden + i)] += weight * y[static_cast<std::size_t>(i)];
    }
  }
  EXPECT_EQ(far, 0) << "values of the intermediate that are no rounding of the exact ones";
  EXPECT_EQ(other_codes, 0);
  EXPECT_LT(test::compare(test::to_doubles(got.view()), want).rel_l2, 0x1p-8);
  // The whole: what the scheme promises where no single value is most of its row.
  if (size < 128) return;
  EXPECT_LT(test::compare(test::to_doubles(got.view()), c.oracle(false)).rel_l2,
            p.quant.output_bound)
      << quant;
}

TEST(CudaExpertsRequantised, EachStep) {
  REQUIRE_HOPPER();
  struct Sizes {
    std::int64_t hidden, intermediate;
  };
  for (const char* quant : {"fp8-tensor", "fp8-channel", "int8", "int4-fp8"}) {
    const bool in_groups = std::string_view(quant) == "int4-fp8";  // of 128 columns
    for (const Sizes s : in_groups
                             ? std::vector<Sizes>{{128, 128}, {384, 640}}
                             : std::vector<Sizes>{{16, 16}, {144, 208}, {384, 640}, {1024, 272}}) {
      for (const char* activation : {"silu", "relu2_no_mul"}) {
        for (const std::int64_t tokens : {1, 2, 17, 129, 800}) {
          if (tokens > 17 && s.hidden > 144) continue;  // the oracle is slow
          SCOPED_TRACE(testing::Message() << quant << ' ' << activation << ' ' << s.hidden << 'x'
                                          << s.intermediate << ' ' << tokens);
          const MoeProblem p = test::problem_of(quant, activation, s.hidden, s.intermediate, 6, 2);
          expect_each_step(test::make_case(31, p, tokens, DType::kBF16, tokens > 1 ? 0.1 : 0.0),
                           quant);
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
