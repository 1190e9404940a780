// Rows that reach the experts as codes and scales.
#include <gtest/gtest.h>

#include "support/experts_run.h"
#include "support/fp8_rows.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::StandardCase;

using Codes = test::Fp8Rows;
Codes quantized(const Tensor& rows, bool power_of_two) {
  return test::fp8_rows(
      rows, power_of_two ? quant::ScaleRounding::kCeilPowerOfTwo : quant::ScaleRounding::kNone);
}

struct Call {
  Tensor workspace, output;
  ExpertsArgs args;
};
Call arguments(const Experts& experts, const StandardCase& c, const Codes& q) {
  Call r;
  const std::int64_t tokens = c.hidden_states.shape()[0];
  r.workspace = test::poisoned_bytes(experts.workspace_size(tokens).value());
  r.output = Tensor::uninitialized(DType::kF32, c.hidden_states.shape()).value();
  test::poison(r.output.view());
  r.args.hidden_states = q.codes.view();
  r.args.hidden_scale = q.scales.view();
  r.args.topk_ids = c.routing.ids.view();
  r.args.topk_weights = c.routing.weights.view();
  r.args.workspace = {r.workspace.data(), static_cast<std::size_t>(r.workspace.bytes())};
  r.args.output = r.output.view();
  return r;
}

std::vector<std::string> backends(const MoeProblem& problem) {
  std::vector<std::string> names;
  for (const CandidateReport& row : explain_experts(problem)) {
    if (row.accepted) names.push_back(row.name);
  }
  return names;
}

TEST(QuantizedRows, GiveTheBitsOfTheRowsTheyWereMadeOf) {
  for (const bool power_of_two : {false, true}) {
    MoeProblem problem = test::small_problem("fp8-block");
    if (power_of_two) problem.hidden_size = 200;  // the last group is a part of one
    if (power_of_two) problem.quant.activation.scale_format = ScaleFormat::kE8M0;
    const StandardCase c = test::make_case(11, problem, 13, DType::kBF16, 0.1);
    const Codes q = quantized(c.hidden_states, power_of_two);
    for (const std::string& name : backends(c.problem)) {
      const auto experts = test::make_backend(name, c);
      if (!experts->takes_quantized_rows()) continue;
      SCOPED_TRACE(name);
      const Tensor want = test::run_standard(*experts, c);
      Call run = arguments(*experts, c, q);
      const Status status = experts->run(run.args);
      ASSERT_TRUE(status.ok()) << status.message();
      std::string why;
      EXPECT_TRUE(test::same_bits(run.output.view(), want.view(), &why)) << why;
    }
  }
}

TEST(QuantizedRows, AreRefusedByNameWhereTheyDoNotFit) {
  const StandardCase c = test::make_case(12, test::small_problem("fp8-block"), 5, DType::kBF16);
  const Codes q = quantized(c.hidden_states, false);
  int taken = 0;
  for (const std::string& name : backends(c.problem)) {
    const auto experts = test::make_backend(name, c);
    if (!experts->takes_quantized_rows()) continue;
    ++taken;
    SCOPED_TRACE(name);
    Call run = arguments(*experts, c, q);
    ExpertsArgs bad = run.args;
    bad.hidden_states = c.hidden_states.view();
    expect_refusal(experts->run(bad), StatusCode::kInvalidDType, {"hidden_states", "F8_E4M3"});
    bad = run.args;
    bad.hidden_scale.shape = Shape{5, 1};
    expect_refusal(experts->run(bad), StatusCode::kInvalidShape, {"hidden_scale", "[5, 2]"});
    bad = run.args;
    bad.hidden_scale.dtype = DType::kBF16;
    expect_refusal(experts->run(bad), StatusCode::kInvalidDType, {"hidden_scale"});
    bad = run.args;
    bad.hidden_scale = ConstTensorView(run.output.data(), DType::kF32, q.scales.shape());
    expect_refusal(experts->run(bad), StatusCode::kAliasing, {"output", "hidden_scale"});
    bad = run.args;
    bad.hidden_scale = {};
    expect_refusal(experts->run(bad), StatusCode::kInvalidDType, {"hidden_states", "F8_E4M3"});
  }
  EXPECT_GE(taken, 2);

  const StandardCase plain = test::make_case(12, test::small_problem("bf16"), 5, DType::kBF16);
  for (const std::string& name : backends(plain.problem)) {
    const auto experts = test::make_backend(name, plain);
    EXPECT_FALSE(experts->takes_quantized_rows());
    Call run = arguments(*experts, plain,
                         {Tensor::zeros(DType::kF8E4M3, {5, 96}).value(),
                          Tensor::zeros(DType::kF32, {5, 1}).value()});
    expect_refusal(experts->run(run.args), StatusCode::kUnsupported, {"hidden_scale", "bf16"});
  }
}

}  // namespace
}  // namespace moesaic
