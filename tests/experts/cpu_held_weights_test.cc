// How the fast CPU backends hold weights whose numbers are known to need less room: no bit of a result
// changes, and they are as large as in the file.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

#include "experts/cpu/experts.h"
#include "experts_on_tier.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::make;
using test::make_problem;
using test::OwnedExpertWeights;
using test::OwnedRouting;
using test::run_standard;
using test::tiers;

// Outputs of both on every tier, held as `held` and as `wide` says, which says less.
void expect_same_bits(const char* quant, const Scheme& held, const Scheme& wide,
                      std::uint64_t seed) {
  for (const auto& [hidden, inner] : {std::pair{1056, 160}, std::pair{288, 544}}) {
    MoeProblem p = make_problem(quant, hidden, inner, 4, 2);
    p.quant = held;
    ASSERT_TRUE(validate(p.quant).ok());
    MoeProblem q = p;
    q.quant = wide;
    const OwnedExpertWeights w = test::random_expert_weights(++seed, p);
    for (const std::int64_t tokens : {1, 5, 70}) {
      test::Rng rng(seed);
      const Tensor x = test::random_normal(rng, p.activation_dtype, {tokens, hidden});
      const OwnedRouting routing = test::random_routing(seed, tokens, 4, 2);
      for (const std::string& tier : tiers()) {
        const auto narrow = make(tier, p, w), other = make(tier, q, w);
        EXPECT_LT(narrow->weight_bytes(), other->weight_bytes());
        const Tensor got = run_standard(*narrow, p, x.view(), routing, DType::kF32);
        const Tensor want = run_standard(*other, q, x.view(), routing, DType::kF32);
        std::string why;
        EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why))
            << tier << " " << quant << " H " << hidden << " tokens " << tokens << " " << why;
      }
    }
  }
}

// What is known of the numbers changes how they are held, and no bit of the result.
TEST(CpuExperts, WeightsHeldAsInTheFileHaveTheBitsOfThoseThatAreNot) {
  std::uint64_t seed = 400;
  for (const char* quant : {"q3k", "q4k", "q5k", "q6k", "q4k-m", "iq4", "q3k-int8", "q4k-int8",
                            "q5k-int8", "q6k-int8", "q4k-m-int8"}) {
    const Scheme plain = test::scheme_called(quant);
    OperandQuant weight = plain.weight;
    weight.super_bits =
        std::string_view(quant).starts_with("q4k-m") || weight.block_k == 16 ? 8 : 6;
    if (weight.table != CodeTable::kNone) weight.super_bits = 8;
    if (weight.dtype == DType::kI8) weight.code_bits = 6;
    expect_same_bits(quant, with_weight(plain, weight), plain, seed += 2);
  }
}

TEST(CpuExperts, ScalesHeldIn16BitsHaveTheBitsOfThoseThatAreNot) {
  std::uint64_t seed = 500;
  for (const char* quant :
       {"int4-g32", "gptq", "q6k", "iq4", "int4-g32-int8", "gptq-int8", "q6k-int8"}) {
    const Scheme plain = test::scheme_called(quant);
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      OperandQuant weight = plain.weight;
      weight.scale_dtype = dtype;
      expect_same_bits(quant, with_weight(plain, weight), plain, seed += 2);
    }
  }
}

// Whole super-blocks: bits a weight of 256 columns in a GGUF file.
TEST(CpuExperts, WeightsOfGgufTypesAreNoLargerThanInTheFile) {
  for (const auto& [quant, block_bytes] :
       {std::pair{"q6_k", 210}, std::pair{"q6_k-int8", 210}, std::pair{"q4_k", 144},
        std::pair{"q4_k-int8", 144}, std::pair{"q4_0", 8 * 18}, std::pair{"q4_0-int8", 8 * 18},
        std::pair{"q8_0", 8 * 34}, std::pair{"q8_0-int8", 8 * 34}}) {
    MoeProblem p = make_problem("bf16", 512, 256, 3, 2);
    for (const Scheme& s : stored_schemes()) {
      if (s.name == quant) p.quant = s;
    }
    ASSERT_EQ(p.quant.name, quant);
    const OwnedExpertWeights w = test::random_expert_weights(7, p);
    const std::int64_t weights = 3 * (w.w13.shape()[1] + 256) * std::int64_t{512};
    for (const std::string& tier : tiers()) {
      EXPECT_EQ(make(tier, p, w)->weight_bytes(), weights / 256 * block_bytes)
          << tier << " " << quant;
    }
  }
}

// Of two types: each matrix is as large as its own blocks.
TEST(CpuExperts, MatricesOfTwoTypesAreNoLargerThanInTheFile) {
  for (const char* quant : {"q4k-q6k", "q4k-q6k-int8", "q40-q80", "q40-q80-int8"}) {
    const bool k = std::string_view(quant).starts_with("q4k");
    const MoeProblem p = make_problem(quant, 512, 256, 3, 2);
    const OwnedExpertWeights w = test::random_expert_weights(7, p);
    const std::int64_t blocks = 3 * std::int64_t{512};  // of all experts, a row of w2 each
    const std::int64_t w13 = 2 * blocks * (k ? 144 : 8 * 18), w2 = blocks * (k ? 210 : 8 * 34);
    for (const std::string& tier : tiers())
      EXPECT_EQ(make(tier, p, w)->weight_bytes(), w13 + w2) << tier << " " << quant;
  }
}

// Held as one form for both or in two, the numbers are the same: sums of other groups differ by
// roundings of fp32 alone.
TEST(CpuExperts, MatricesInTheirOwnFormsHaveTheSumsOfOneForBoth) {
  for (const char* quant : {"q4k-q6k", "q40-q80"}) {
    const MoeProblem p = make_problem(quant, 512, 288, 4, 2);
    MoeProblem q = p;
    q.quant.forms.reset();
    const OwnedExpertWeights w = test::random_expert_weights(17, p);
    test::Rng rng(18);
    const Tensor x = test::random_normal(rng, p.activation_dtype, {21, 512});
    const OwnedRouting routing = test::random_routing(19, 21, 4, 2);
    for (const std::string& tier : tiers()) {
      const auto own = make(tier, p, w), common = make(tier, q, w);
      EXPECT_LT(own->weight_bytes(), common->weight_bytes()) << tier << " " << quant;
      const Tensor got = run_standard(*own, p, x.view(), routing, DType::kF32);
      const Tensor want = run_standard(*common, q, x.view(), routing, DType::kF32);
      // An element of the intermediate that is rounded to bf16 the other way, rarely.
      EXPECT_LE(test::compare(test::to_doubles(got.view()), test::to_doubles(want.view())).rel_l2,
                0x1p-11)
          << tier << " " << quant;
    }
  }
}

TEST(CpuExperts, NumbersThatHaveNotTheFormOfTheirMatrixAreRefused) {
  const MoeProblem p = make_problem("q4k-q6k", 512, 256, 3, 2);
  OwnedExpertWeights w = test::random_expert_weights(8, p);
  const auto refusal = [&] {
    const auto source = make_stacked_source(w.view());
    return experts::make_cpu_experts(tiers().front(), p, *source).status();
  };
  EXPECT_TRUE(refusal().ok());
  const auto refused = [&](auto* at, auto value, std::initializer_list<const char*> words) {
    const auto had = *at;
    *at = value;
    test::expect_refusal(refusal(), StatusCode::kInvalidArgument, words);
    *at = had;
  };
  // Expert 1, row 5, of 512 columns in 32 groups of 16, or 256 in 16.
  refused(w.w13.as<std::int8_t>() + (512 + 5) * 512 + 17, std::int8_t{16},
          {"expert 1: w13", "code 16", "row 5", "column 17", "0 to 15"});
  refused(w.w13_scale.as<float>() + (512 + 5) * 32 + 7, 0.3F,
          {"expert 1: w13_scale", "0.3", "row 5", "group 7"});
  refused(w.w13_min.as<float>() + (512 + 5) * 32 + 7, 0.3F,
          {"expert 1: w13_min", "0.3", "row 5", "group 7"});
  refused(w.w2_min.as<float>() + (512 + 5) * 16 + 7, 0.3F,
          {"expert 1: w2_min", "0.3", "row 5", "group 7", "need 0"});
}

TEST(CpuExperts, NumbersThatAreNotWhatTheSchemeSaysAreRefused) {
  MoeProblem p = make_problem("q6k-super", 288, 64, 3, 2);
  OwnedExpertWeights w = test::random_expert_weights(8, p);
  const auto refusal = [&](const OwnedExpertWeights& with) {
    const auto source = make_stacked_source(with.view());
    return experts::make_cpu_experts(tiers().front(), p, *source).status();
  };
  EXPECT_TRUE(refusal(w).ok());
  const std::int64_t at = 2 * 64 * 288 + 5 * 288 + 17;  // expert 1, row 5, column 17
  const auto had = w.w13.as<std::int8_t>()[at];
  w.w13.as<std::int8_t>()[at] = 32;
  test::expect_refusal(refusal(w), StatusCode::kInvalidArgument,
                       {"w13: expert 1", "code 32", "row 5", "column 17", "-32 to 31"});
  w.w13.as<std::int8_t>()[at] = had;
  w.w2_scale.as<float>()[(288 + 7) * 4 + 1] = 0.3F;  // expert 1, row 7
  test::expect_refusal(refusal(w), StatusCode::kInvalidArgument,
                       {"w2_scale", "expert 1", "row 7", "columns from 0", "8 bits"});
}

TEST(CpuExperts, ScalesThatAreNotOfTheDtypeOfTheSchemeAreRefused) {
  for (const auto& [quant, dtype] :
       {std::pair{"int4-g32-f16", "F16"}, {"int4-g32-bf16s", "BF16"}}) {
    MoeProblem p = make_problem(quant, 288, 64, 3, 2);
    OwnedExpertWeights w = test::random_expert_weights(9, p);
    const auto refusal = [&] {
      const auto source = make_stacked_source(w.view());
      return experts::make_cpu_experts(tiers().front(), p, *source).status();
    };
    EXPECT_TRUE(refusal().ok());
    w.w2_scale.as<float>()[(288 + 7) * 2 + 1] = 0.3F;  // expert 1, row 7, group 1
    test::expect_refusal(refusal(), StatusCode::kInvalidArgument,
                         {"w2_scale", "expert 1", "0.3", "row 7", "group 1", dtype, "scale_dtype"});
  }
}

}  // namespace
}  // namespace moesaic
