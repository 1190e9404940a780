#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "experts/problem_checks.h"
#include "support/experts_run.h"

namespace moesaic {
namespace {

using test::small_problem;

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

TEST(ExpertsCatalogue, EndsWithTheReferenceAndHasDistinctNames) {
  const auto rows = experts_catalogue();
  ASSERT_FALSE(rows.empty());
  EXPECT_EQ(rows.back().name, "cpu_reference");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_FALSE(rows[i].description.empty());
    for (std::size_t j = i + 1; j < rows.size(); ++j) EXPECT_NE(rows[i].name, rows[j].name);
  }
}

TEST(ExpertsCatalogue, ExplainNamesEveryRowInOrderWithAReasonForEachRefusal) {
  for (const char* quant : {"f32", "bf16", "f16", "fp8-block", "fp8-bf16", "mxfp4-bf16"}) {
    const auto reports = explain_experts(small_problem(quant));
    ASSERT_EQ(reports.size(), experts_catalogue().size());
    for (std::size_t i = 0; i < reports.size(); ++i) {
      EXPECT_EQ(reports[i].stage, "experts");
      EXPECT_EQ(reports[i].name, experts_catalogue()[i].name);
      EXPECT_EQ(reports[i].accepted, reports[i].reason.empty()) << reports[i].name;
    }
    EXPECT_TRUE(reports.back().accepted) << quant << ": " << reports.back().reason;
  }
}

TEST(ExpertsCatalogue, ChoosesTheFirstAcceptedRow) {
  const MoeProblem problem = small_problem("bf16");
  const auto reports = explain_experts(problem);
  const auto first = std::find_if(reports.begin(), reports.end(),
                                  [](const CandidateReport& r) { return r.accepted; });
  const auto chosen = choose_experts(problem);
  ASSERT_TRUE(chosen.ok()) << chosen.status().to_string();
  EXPECT_EQ((*chosen)->name, first->name);
}

TEST(ExpertsCatalogue, AForcedNameIsTakenOrRefused) {
  const MoeProblem problem = small_problem("bf16");
  const auto forced = choose_experts(problem, "cpu_reference");
  ASSERT_TRUE(forced.ok());
  EXPECT_EQ((*forced)->name, "cpu_reference");
  const auto unknown = choose_experts(problem, "cpu_referense");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(contains(unknown.status().message(), "cpu_referense"));
  EXPECT_TRUE(contains(unknown.status().message(), "cpu_reference"));
}

TEST(ExpertsCatalogue, ATierThatIsNoneIsNotReplacedByTheReference) {
  const char* before = std::getenv("MOESAIC_CPU_TIER");
  const std::string kept = before != nullptr ? before : "";
  ASSERT_EQ(setenv("MOESAIC_CPU_TIER", "avx1024", 1), 0);
  const MoeProblem problem = small_problem("bf16");
  const Status chosen = choose_experts(problem).status();
  EXPECT_EQ(chosen.code(), StatusCode::kNotFound);
  EXPECT_TRUE(contains(chosen.message(), "MOESAIC_CPU_TIER: CPU tier: got 'avx1024'"));
  EXPECT_TRUE(choose_experts(problem, "cpu_reference").ok());
  ASSERT_EQ(before != nullptr ? setenv("MOESAIC_CPU_TIER", kept.c_str(), 1)
                              : unsetenv("MOESAIC_CPU_TIER"),
            0);
}

TEST(ExpertsCatalogue, AProblemThatNobodyCanComputeKeepsItsOwnError) {
  MoeProblem problem = small_problem("bf16");
  problem.top_k = 7;
  const auto chosen = choose_experts(problem);
  ASSERT_FALSE(chosen.ok());
  EXPECT_EQ(chosen.status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(contains(chosen.status().message(), "top_k: got 7, need 1 .. 6"));
}

TEST(ExpertsCatalogue, TheReferenceImplementsEveryActivationSchemeAndFormat) {
  for (const char* quant : {"f32", "bf16", "f16", "fp8-block", "fp8-bf16", "mxfp4-bf16"}) {
    for (const char* name : {"silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "silu_no_mul",
                             "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}) {
      for (const auto format : {ActivationFormat::kStandard, ActivationFormat::kBatched}) {
        MoeProblem problem = small_problem(quant);
        problem.activation = make_activation(name).value();
        problem.format = format;
        problem.has_expert_bias = true;
        EXPECT_TRUE(choose_experts(problem, "cpu_reference").ok()) << quant << " " << name;
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
