// Experts that move as rows of a backend's own arrays.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "support/experts_run.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

constexpr const char* kMovedSchemes[] = {
    "f32",        "bf16",         "f16",          "fp8-block",  "fp8-bf16",
    "fp8-tensor", "fp8-static",   "fp8-channel",  "mxfp8",      "mxfp4-fp8",
    "mxfp4",      "mxfp4-static", "nvfp4",        "nvfp4-rows", "nf4-bf16",
    "fp4-bf16",   "gptq",         "int4-channel", "int4-fp8",   "int4-fp8-static",
    "int8",       "int4-g128",    "q4k",          "q6k",        "u8-zero",
    "awq-int8",   "mxfp4-int8",   "q6k-int8"};

// Row `from` of every array of one, over row `to` of the other's.
void copy_expert(Experts& a, std::int64_t from, Experts& b, std::int64_t to) {
  const std::vector<ExpertPart> source = a.expert_parts(), target = b.expert_parts();
  ASSERT_EQ(source.size(), target.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    EXPECT_EQ(source[i].name, target[i].name);
    const TensorView &x = source[i].rows, &y = target[i].rows;
    ASSERT_EQ(x.dim(1), y.dim(1)) << source[i].name;
    std::memcpy(y.data + to * y.dim(1), x.data + from * x.dim(1),
                static_cast<std::size_t>(x.dim(1)));
  }
}

TEST(ExpertParts, CopiedRowsAreTheExpertToTheBit) {
  int compared = 0;
  for (const char* scheme : kMovedSchemes) {
    MoeProblem problem = test::small_problem(scheme);
    problem.has_expert_bias = true;
    const test::StandardCase mine = test::make_case(11, problem, 9, DType::kBF16);
    test::StandardCase other = test::make_case(12, problem, 9, DType::kBF16);
    for (const ExpertsBackend& row : experts_catalogue()) {
      if (!row.can_implement(mine.problem).ok()) continue;
      const auto a = test::make_backend(row.name, mine);
      const auto b = test::make_backend(row.name, other);
      const Tensor want = test::run_standard(*a, mine);
      std::int64_t bytes = 0;
      for (const ExpertPart& part : b->expert_parts()) {
        EXPECT_EQ(part.rows.dim(0), problem.num_local_experts) << row.name << ' ' << part.name;
        bytes += part.rows.dim(0) * part.rows.dim(1);
      }
      EXPECT_EQ(bytes, b->weight_bytes()) << row.name << ' ' << scheme << ": arrays left out";
      // Every expert of the one, in the reverse order, in the other.
      test::StandardCase moved = test::make_case(11, problem, 9, DType::kBF16);
      for (std::int64_t e = 0; e < problem.num_local_experts; ++e) {
        const std::int64_t to = problem.num_local_experts - 1 - e;
        copy_expert(*a, e, *b, to);
        moved.expert_map.push_back(static_cast<std::int32_t>(to));
      }
      std::string why;
      EXPECT_TRUE(test::same_bits(test::run_standard(*b, moved).view(), want.view(), &why))
          << row.name << ' ' << scheme << ": " << why;
      ++compared;
    }
  }
  EXPECT_GE(compared, 30);
}

}  // namespace
}  // namespace moesaic
