// What rounding does to rows (moesaic/numerics.h): measured alike by every backend, without a
// change to the result, and true: where nothing is reported the error is within the bound.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "experts/row_error.h"
#include "numerics/element.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::compare;
using test::make_backend;
using test::make_case;
using test::poisoned_bytes;
using test::scheme_called;
using test::small_problem;
using test::StandardCase;
using test::to_doubles;

OperandQuant activation_of(std::string_view quant) { return scheme_called(quant).activation; }

experts::RowError measure(std::string_view quant, std::vector<float> row, float input_scale = 1.0F,
                          DType dtype = DType::kF32) {
  MoeProblem problem = test::small_problem("bf16");
  problem.quant.activation = activation_of(quant);
  experts::RowErrorMeter meter(problem, dtype);
  return meter.measure(row.data(), static_cast<std::int64_t>(row.size()), input_scale);
}

TEST(RowError, SumsOfARowThatCanBeDoneByHand) {
  // int8 with the scale 1: 0.25 becomes 0, 3.5 becomes 4 (ties to even).
  const experts::RowError e = measure("int8", {127.0F, 0.25F, 3.5F});
  EXPECT_EQ(e.size, 127.0 * 127 + 0.0625 + 12.25);
  EXPECT_EQ(e.error, 0.0625 + 0.25);
  EXPECT_EQ(e.along, -0.0625 + 0.5 * 3.5);
  EXPECT_EQ(e.lost, 0);
  EXPECT_FALSE(e.saturated);
  EXPECT_TRUE(e.finite);
  EXPECT_EQ(measure("f32", {1.1F, -3.3F}).error, 0);
  EXPECT_GT(measure("bf16", {1.001F, -3.3F}, 1.0F, DType::kBF16).error, 0);
}

TEST(RowError, SaturationBeginsWhereRoundingEnds) {
  EXPECT_FALSE(measure("fp8-static", {463.0F}).saturated);
  EXPECT_TRUE(measure("fp8-static", {465.0F}).saturated);
  EXPECT_TRUE(measure("fp8-static", {-465.0F}).saturated);
  EXPECT_TRUE(measure("fp8-static", {233.0F}, 0.5F).saturated);
  EXPECT_FALSE(measure("fp8-tensor", {1e30F, 1.0F}).saturated) << "dynamic scales do not";
  // NVFP4 reaches 6 * 448 of its static scale.
  EXPECT_FALSE(measure("nvfp4", std::vector<float>(16, 2600.0F)).saturated);
  EXPECT_TRUE(measure("nvfp4", std::vector<float>(16, 4000.0F)).saturated);
}

TEST(RowError, ValuesBelowTheCodesAreLost) {
  EXPECT_EQ(measure("fp8-tensor", {1e-3F, 5e-4F}).lost, 0);
  // The smallest scale of a row is 1 / (448 * 512).
  const experts::RowError tiny = measure("fp8-tensor", {1e-9F, 5e-10F});
  EXPECT_GT(tiny.lost, 0.9 * tiny.size);
  EXPECT_GT(measure("fp8-static", {1e-3F}).lost, 0);
  EXPECT_GT(measure("nvfp4", std::vector<float>(16, 1e-4F)).lost, 0);
  EXPECT_GT(measure("f16", {1e-8F}, 1.0F, DType::kF16).lost, 0);
  EXPECT_EQ(measure("fp8-tensor", {0.0F, 0.0F}).lost, 0) << "zeros are exact";
}

TEST(RowError, NotFinite) {
  EXPECT_FALSE(measure("int8", {1.0F, NAN}).finite);
  EXPECT_FALSE(measure("bf16", {INFINITY}, 1.0F, DType::kBF16).finite);
  EXPECT_FALSE(measure("f16", {70000.0F}, 1.0F, DType::kF16).finite) << "f16 has no 70000";
}

TEST(Numerics, SummaryCountsRowsByKind) {
  std::vector<RowNumerics> rows(4);
  rows[0] = {4.0, 0.01, 0};
  rows[1] = {0.0, 0.0, kRowFlushed};
  rows[2] = {5.0, 0.08, kRowSaturated | kRowBeyondBound};
  rows[3] = {0.0, 0.0, kRowNotFinite};
  const NumericsSummary s = summarize(rows);
  EXPECT_EQ(s.rows, 4);
  EXPECT_EQ(s.outside, 3);
  EXPECT_EQ(s.flushed, 1);
  EXPECT_EQ(s.saturated, 1);
  EXPECT_EQ(s.beyond_bound, 1);
  EXPECT_EQ(s.not_finite, 1);
  EXPECT_DOUBLE_EQ(s.error_estimate(), std::sqrt(0.09 / 9.0));
  EXPECT_DOUBLE_EQ(s.effective_rows(), 81.0 / 41.0);
  NumericsSummary twice = s;
  twice.add(s);
  EXPECT_DOUBLE_EQ(twice.effective_rows(), 162.0 / 41.0);
  EXPECT_EQ(NumericsSummary().effective_rows(), 0.0);
  EXPECT_FALSE(s.within(1.0));
  const NumericsSummary clean = summarize({rows.data(), 1});
  EXPECT_TRUE(clean.within(0.06));
  EXPECT_FALSE(clean.within(0.04)) << "the estimate is 0.05";
}

TEST(Numerics, BoundsOfOneCall) {
  NumericsSummary s;
  s.size = 1;
  s.noise = 0.03 * 0.03;
  EXPECT_EQ(computed_bound(0.06, 0.06, s), 0.06) << "within: the stated one";
  s.noise = 0.1 * 0.1;
  EXPECT_NEAR(computed_bound(0.06, 0.06, s), 0.15, 1e-12);
  EXPECT_NEAR(computed_bound(0.10, 0.06, s), std::hypot(0.08, 0.15), 1e-12) << "weights' part";
  s.noise = 0.05 * 0.05;
  s.rows = 16;
  EXPECT_EQ(computed_bound(0.06, 0.06, s), 0.06);
  s.rows = 15;
  EXPECT_NEAR(computed_bound(0.06, 0.06, s), 0.075, 1e-12) << "single rows scatter";
  s.rows = 16;
  s.squares = 1.0 / 7;
  EXPECT_NEAR(computed_bound(0.06, 0.06, s), 0.075, 1e-12) << "as few, if most are small";
  s.squares = 1.0 / 9;
  EXPECT_EQ(computed_bound(0.06, 0.06, s), 0.06);
  s.noise = 0.055 * 0.055;
  EXPECT_NEAR(computed_bound(0.06, 0.06, s), 1.15 * 0.055, 1e-12) << "no estimate is exact";
  s.not_finite = 1;
  EXPECT_TRUE(std::isinf(computed_bound(0.06, 0.06, s)));
  s.not_finite = 0;
  s.noise = 1;
  EXPECT_TRUE(std::isinf(computed_bound(0.06, 0.06, s))) << "no bound worth the name";
}

TEST(Numerics, Int8GrowsWithTheIntermediateSize) {
  const Scheme int8 = quant_scheme_from_name("int8").value();
  EXPECT_EQ(output_bound(int8, 512), int8.output_bound);
  EXPECT_NEAR(output_bound(int8, 14336), 4.73e-2, 1e-4);
  const Scheme fp8 = quant_scheme_from_name("fp8-block").value();
  EXPECT_EQ(output_bound(fp8, 14336), fp8.output_bound);
  const Scheme groups = quant_scheme_from_name("int4-g128-int8").value();
  EXPECT_EQ(output_bound(groups, 14336), groups.output_bound) << "a scale per group does not grow";
  EXPECT_LT(groups.output_bound, int8.output_bound);
  EXPECT_EQ(activation_bound(quant_scheme_from_name("nvfp4")->activation, 512), 0.25);
  EXPECT_EQ(activation_bound(quant_scheme_from_name("mxfp4")->activation, 512), 0.3);
  EXPECT_EQ(activation_bound(quant_scheme_from_name("nf4-bf16")->activation, 512), 6e-3);
}

// --- Backends ------------------------------------------------------------------------------------

struct Measured {
  Tensor output;
  std::vector<RowNumerics> rows;
};

Measured run_measured(const Experts& experts, const StandardCase& c, bool measured = true) {
  const std::int64_t tokens = c.hidden_states.shape()[0];
  Measured m;
  m.rows.resize(measured ? static_cast<std::size_t>(tokens) : 0);
  m.output = Tensor::uninitialized(DType::kF32, {tokens, c.problem.hidden_size}).value();
  test::poison(m.output.view());
  Tensor workspace = poisoned_bytes(experts.workspace_size(tokens).value());
  ExpertsArgs args;
  args.hidden_states = c.hidden_states.view();
  args.topk_ids = c.routing.ids.view();
  args.topk_weights = c.routing.weights.view();
  args.expert_map = c.expert_map;
  args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
  args.output = m.output.view();
  args.numerics = m.rows;
  const Status status = experts.run(args);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return m;
}

struct Input {
  const char* name;
  double outlier, scale;
};
constexpr Input kInputs[] = {{"normal", 1, 1},
                             {"outlier", 30, 1},
                             {"strong outlier", 100, 1},
                             {"tiny", 1, 1e-4},
                             {"large", 1, 1e3}};

void change(const Input& input, Tensor& x) {
  const std::int64_t hidden = x.shape()[1];
  for (std::int64_t i = 0; i < x.shape()[0] * hidden; ++i) {
    const double factor = input.scale * (i % hidden == 5 ? input.outlier : 1.0);
    store_from_f32(x.data(), x.dtype(), i,
                   load_as_f32(x.data(), x.dtype(), i) * static_cast<float>(factor));
  }
}

class NumericsScheme : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Schemes, NumericsScheme,
                         testing::Values("f32", "bf16", "f16", "fp8-block", "fp8-tensor",
                                         "fp8-static", "fp8-channel", "mxfp8", "mxfp4-fp8", "mxfp4",
                                         "nvfp4", "int4-fp8", "int8", "int4-g128", "gptq", "q4k",
                                         "nf4-bf16", "int4-g128-int8", "mxfp4-int8", "q4k-int8"),
                         [](const auto& param) {
                           std::string name = param.param;
                           for (char& ch : name) ch = ch == '-' ? '_' : ch;
                           return name;
                         });

TEST_P(NumericsScheme, EveryBackendSaysTheSameAndNothingWrongIsUnsaid) {
  MoeProblem problem = small_problem(GetParam());
  problem.hidden_size = 256, problem.intermediate_size = 256;
  for (const Input& input : kInputs) {
    SCOPED_TRACE(input.name);
    StandardCase c = make_case(31, problem, 10, problem.activation_dtype, 0.1);
    change(input, c.hidden_states);
    const std::vector<double> exact = c.oracle(false);
    const double bound = activation_bound(problem.quant.activation, problem.intermediate_size);
    const NumericsSummary want = summarize(run_measured(*make_backend("cpu_reference", c), c).rows);
    for (const CandidateReport& report : explain_experts(problem)) {
      if (!report.accepted) continue;
      SCOPED_TRACE(report.name);
      const auto experts = make_backend(report.name, c);
      const Measured m = run_measured(*experts, c);
      const Measured plain = run_measured(*experts, c, false);
      std::string why;
      EXPECT_TRUE(test::same_bits(m.output.view(), plain.output.view(), &why)) << why;
      const NumericsSummary got = summarize(m.rows);
      // A sum in another order may move a value over a rounding boundary, nothing more.
      if (std::isfinite(want.error_estimate())) {
        EXPECT_NEAR(got.error_estimate(), want.error_estimate(),
                    0.05 * want.error_estimate() + 1e-9);
      } else {
        EXPECT_EQ(got.error_estimate(), want.error_estimate());
      }
      EXPECT_EQ(got.rows, want.rows);
      EXPECT_NEAR(static_cast<double>(got.outside), static_cast<double>(want.outside), 1.0);
      if (input.outlier == 1 && input.scale == 1 && std::string(GetParam()) != "nvfp4" &&
          std::string(GetParam()) != "fp8-static") {
        EXPECT_EQ(got.outside, 0) << "normal data, estimate " << got.error_estimate();
      }
      EXPECT_EQ(got.not_finite, want.not_finite);
      if (got.not_finite > 0) continue;
      const auto off = compare(to_doubles(m.output.view()), exact);
      const double in_force = computed_bound(output_bound(problem.quant, 256), bound, got);
      EXPECT_TRUE(off.rel_l2 <= in_force || (!got.within(bound) && std::isinf(in_force)))
          << "error " << off.rel_l2 << " bound " << in_force << " estimate " << got.error_estimate()
          << " outside " << got.outside;
      EXPECT_TRUE(got.within(bound) ? off.rel_l2 <= output_bound(problem.quant, 256) : true)
          << "outside the stated bound without a word: " << off.rel_l2;
    }
  }
}

void change_all(Tensor& x, float times, float plus) {
  for (std::int64_t i = 0; i < x.shape()[0] * x.shape()[1]; ++i) {
    store_from_f32(x.data(), x.dtype(), i, load_as_f32(x.data(), x.dtype(), i) * times + plus);
  }
}

// The error is within the bound in force, for rows whose kind is in the name. Returns their summary.
NumericsSummary expect_bounded(const char* backend, const StandardCase& c, double stated) {
  const MoeProblem& p = c.problem;
  const Measured m = run_measured(*make_backend(backend, c), c);
  const NumericsSummary got = summarize(m.rows);
  const double activation = activation_bound(p.quant.activation, p.intermediate_size);
  const auto off = compare(to_doubles(m.output.view()), c.oracle(false));
  const double in_force = computed_bound(stated, activation, got);
  EXPECT_LE(off.rel_l2, in_force) << backend << ", estimate " << got.error_estimate()
                                  << ", outside " << got.outside;
  return got;
}

constexpr const char* kBackends[] = {"cpu_reference", "cpu_baseline"};

// Far beyond an activation's limits only the few columns that are not clamped move, and an error of
// the rows is a larger part of what is left.
TEST(Numerics, RowsBeyondTheLimitsOfTheActivationAreSaid) {
  ActivationParams limited;
  limited.limit = 10.0F;
  const ActivationSpec kinds[] = {make_activation("swigluoai").value(),
                                  make_activation("silu", limited).value(),
                                  make_activation("swiglustep").value()};
  for (const ActivationSpec& activation : kinds) {
    for (const char* quant : {"fp8-channel", "fp8-block", "mxfp8", "bf16", "int8"}) {
      MoeProblem problem = small_problem(quant);
      problem.hidden_size = 256, problem.intermediate_size = 256;
      problem.activation = activation;
      for (const float times : {1.0F, 30.0F, 1000.0F}) {
        SCOPED_TRACE(fmt::format("{} {} x{}", activation_name(activation.kind), quant, times));
        StandardCase c = make_case(5, problem, 16, DType::kF32);
        change_all(c.hidden_states, times, 0.0F);
        for (const char* backend : kBackends) {
          const NumericsSummary got = expect_bounded(backend, c, output_bound(problem.quant, 256));
          if (times == 1.0F) {
            EXPECT_EQ(got.outside, 0) << backend;
          } else if (times == 1000.0F) {
            EXPECT_GT(got.beyond_bound, 0) << backend;
          }
        }
      }
    }
  }
}

TEST(Numerics, RowsThatAreLostHaveNoBound) {
  for (const char* quant : {"fp8-channel", "fp8-block"}) {
    StandardCase c = make_case(6, small_problem(quant), 20, DType::kF32);
    change_all(c.hidden_states, 1e-20F, 0.0F);
    for (const char* backend : kBackends) {
      const NumericsSummary got = summarize(run_measured(*make_backend(backend, c), c).rows);
      EXPECT_EQ(got.flushed, 20) << backend;
      EXPECT_TRUE(std::isinf(computed_bound(6e-2, 6e-2, got))) << backend << ' ' << quant;
    }
  }
}

// Entries of the table are rounded to BF16, some one way: their mean adds up over a row's.
TEST(Numerics, RoundedTablesAndRowsWithAMean) {
  for (const float mean : {0.0F, 1.0F, 3.0F}) {
    MoeProblem problem = small_problem("nf4-bf16");
    problem.hidden_size = 1024, problem.intermediate_size = 256;
    StandardCase c = make_case(7, problem, 20, DType::kBF16);
    change_all(c.hidden_states, 1.0F, mean);
    for (const char* backend : kBackends) {
      SCOPED_TRACE(fmt::format("mean {}", mean));
      const NumericsSummary got = expect_bounded(backend, c, 6e-3);
      EXPECT_TRUE(mean > 0.0F || got.error_estimate() <= 6e-3) << "normal rows are within";
    }
  }
}

// The weight, and its products with the row, are rounded before the row is measured.
TEST(Numerics, RoundingOfAWeightOnTheInputCounts) {
  for (const char* quant : {"bf16", "gptq"}) {  // of gptq the columns have another order
    MoeProblem problem = small_problem(quant);
    problem.top_k = 1;
    problem.apply_router_weight_on_input = true;
    for (const bool constant : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", quant, constant));
      StandardCase c = make_case(8, problem, 20, DType::kF32);
      if (constant) change_all(c.hidden_states, 0.0F, 1.00379F);
      std::vector<double> estimates;
      for (const char* backend : kBackends) {
        const NumericsSummary got =
            expect_bounded(backend, c, std::hypot(6e-3, weight_on_input_bound(DType::kBF16)));
        estimates.push_back(got.error_estimate());
        EXPECT_GT(got.error_estimate(), 2e-3) << "the product's rounding is part of it";
      }
      EXPECT_NEAR(estimates[0], estimates[1], 0.05 * estimates[0]);
    }
  }
}

TEST(Numerics, RoundedOutputsHaveAWiderBound) {
  EXPECT_EQ(with_output_rounding(2e-6, DType::kF32), 2e-6);
  EXPECT_EQ(with_output_rounding(2e-6, DType::kBF16), std::hypot(2e-6, 0x1p-8));
  EXPECT_EQ(with_output_rounding(2e-6, DType::kF16), std::hypot(2e-6, 0x1p-11));
  EXPECT_EQ(with_output_rounding(1e-3, DType::kBF16), std::hypot(1e-3, 0x1p-8));
  EXPECT_EQ(with_output_rounding(1e-3, DType::kF16), 1e-3) << "contained";
  EXPECT_EQ(with_output_rounding(6e-3, DType::kBF16), 6e-3);
}

TEST(NumericsRefusals, RowsOfAnotherForm) {
  MoeProblem problem = small_problem("bf16");
  const StandardCase c = make_case(1, problem, 4, DType::kBF16);
  const auto experts = make_backend("cpu_reference", c);
  Tensor workspace = poisoned_bytes(experts->workspace_size(4).value());
  Tensor output = Tensor::zeros(DType::kF32, {4, problem.hidden_size}).value();
  std::vector<RowNumerics> three(3);
  ExpertsArgs args;
  args.hidden_states = c.hidden_states.view();
  args.topk_ids = c.routing.ids.view();
  args.topk_weights = c.routing.weights.view();
  args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
  args.output = output.view();
  args.numerics = three;
  const Status status = experts->run(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidShape);
  EXPECT_NE(status.message().find("numerics: got [3], need [4]"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace moesaic
