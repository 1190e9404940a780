// The fast CPU backends against the float64 oracle and against themselves: every tier that this
// machine has, every scheme, both formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/team.h"
#include "cpu/tiers.h"
#include "experts/cpu/experts.h"
#include "experts/cpu/weight_format.h"
#include "experts_on_tier.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/moe_oracle.h"
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
using test::Workspace;

// These problems are small: their threads are part of what is tested.
const cpu::ScopedTeams always_teams;

// Relative L2 that fp32 accumulation (and the roundings that the scheme prescribes, which the
// oracle repeats) may leave: a rounding of the intermediate that lands on the other side costs one
// unit of that format in few elements.
double bound_like_scheme(std::string_view quant) {
  if (quant == "f32") return 1e-6;
  if (quant == "f16") return 3e-4;
  return test::scheme_called(quant).activation.dtype == DType::kF4E2M1 ? 2e-2 : 3e-3;
}

struct Case {
  const char* quant;
  std::int64_t h, i, tokens;
};

TEST(CpuExperts, EveryTierAndSchemeMeetsItsBoundAgainstFloat64) {
  const Case cases[] = {{"f32", 64, 96, 7},
                        {"f32", 50, 30, 3},
                        {"bf16", 256, 160, 33},
                        {"bf16", 34, 18, 5},
                        {"bf16", 130, 64, 1},
                        {"f16", 128, 96, 9},
                        {"f16", 66, 34, 4},
                        {"fp8-block", 256, 128, 17},
                        {"fp8-block", 384, 256, 1},
                        {"fp8-block", 200, 72, 17},  // ragged blocks
                        {"fp8-block", 50, 194, 1},
                        {"fp8-block-64x64", 256, 160, 17},
                        {"fp8-block-64x64", 200, 72, 5},
                        {"fp8-block-32x128", 256, 128, 9},
                        {"fp8-block-16x16", 80, 48, 9},
                        {"fp8-block-48x96", 200, 100, 17},   // groups across 128 columns
                        {"fp8-block-128x256", 384, 320, 9},  // and of more
                        {"fp8-block-5x4096", 384, 100, 3},
                        {"fp8-bf16-64x32", 200, 72, 6},
                        {"fp8-bf16-48x112", 130, 250, 6},
                        {"fp8-bf16", 200, 72, 6},
                        {"mxfp4-fp8", 160, 96, 9},
                        {"fp8-bf16", 256, 128, 17},
                        {"fp8-bf16", 200, 128, 6},
                        {"mxfp4-bf16", 256, 160, 40},
                        {"mxfp4-bf16", 96, 32, 1},
                        {"mxfp4-bf16", 32, 64, 5},
                        {"fp8-tensor", 200, 100, 9},
                        {"fp8-static", 256, 160, 3},
                        {"fp8-channel", 256, 160, 40},
                        {"mxfp8", 96, 160, 9},
                        {"mxfp8", 256, 32, 1},
                        {"mxfp4-fp8", 256, 128, 20},
                        {"mxfp4-f32-groups", 128, 256, 20},
                        {"mxfp4-static", 96, 160, 20},
                        {"mxfp4-token", 96, 160, 20},
                        {"mxfp4-static", 256, 32, 1},
                        {"mxfp4", 96, 64, 8},
                        {"nvfp4", 256, 80, 20},
                        {"nvfp4", 48, 32, 2},
                        {"nvfp4-rows", 64, 48, 8},
                        {"int4-fp8", 256, 128, 20},
                        {"int4-fp8", 128, 256, 1},
                        {"int4-fp8-static", 256, 128, 20},
                        {"int4-fp8-g32", 256, 96, 20},
                        {"int4-fp8-g32", 64, 160, 1},
                        {"int4-fp8-g96", 192, 96, 5},
                        {"int8", 200, 100, 20},
                        {"int4-g128", 256, 384, 7},
                        {"int4-g128", 200, 66, 3},
                        {"int8-bf16", 100, 50, 12},
                        {"nvfp4-bf16", 96, 80, 5},
                        {"nf4-bf16", 128, 64, 8},
                        {"fp4-bf16", 64, 128, 2},
                        {"iq4", 96, 160, 7},
                        {"iq4", 256, 64, 1},
                        {"gptq", 128, 96, 20},
                        {"gptq", 80, 50, 1},
                        {"q4k", 256, 96, 6},
                        {"q6k", 96, 80, 9},
                        {"u8-zero", 150, 70, 4},
                        {"int4-channel", 96, 34, 11},
                        {"int4-g128-int8", 256, 384, 7},
                        {"int4-g128-int8", 200, 66, 90},  // ragged groups, many rows
                        {"int8-g128-int8", 384, 160, 40},
                        {"int4-g32-int8", 96, 160, 33},
                        {"int4-channel-int8", 200, 66, 3},
                        {"awq-int8", 192, 64, 60},
                        {"mxfp4-int8", 256, 384, 40},
                        {"mxfp4-int8", 96, 160, 5},
                        {"awq-int8", 70, 34, 1},
                        {"gptq-int8", 128, 96, 20},
                        {"q4k-int8", 256, 96, 6},
                        {"q6k-int8", 96, 80, 40},
                        {"u8-zero-int8", 150, 70, 4},
                        {"q3k-super", 512, 96, 3},
                        {"q4k-super", 256, 96, 6},
                        {"q4k-super", 512, 288, 40},
                        {"q5k-super", 256, 96, 6},
                        {"q6k-super", 96, 80, 9},
                        {"q6k-super", 320, 528, 40},
                        {"q4k-m-super", 96, 272, 7},
                        {"q4k-super-int8", 256, 96, 6},
                        {"q6k-super-int8", 96, 80, 40},
                        {"q4k-q6k", 256, 96, 6},
                        {"q4k-q6k", 512, 288, 40},
                        {"q4k-q6k", 96, 272, 1},
                        {"q4k-q6k-int8", 256, 96, 6},
                        {"q4k-q6k-int8", 512, 272, 40},
                        {"q4k-q5k", 256, 96, 6},
                        {"q5k-q6k", 256, 96, 6},
                        {"q4k-q5k-int8", 512, 160, 40},
                        {"q5k-q6k-int8", 512, 272, 40},
                        {"q40-q80", 160, 96, 9},
                        {"q40-q80-int8", 160, 96, 9}};
  std::uint64_t seed = 1;
  for (const Case& c : cases) {
    const MoeProblem p = make_problem(c.quant, c.h, c.i, 5, 3);
    const OwnedExpertWeights w = test::random_expert_weights(++seed, p);
    test::Rng rng(seed);
    const Tensor x = test::random_normal(rng, p.activation_dtype, {c.tokens, c.h});
    const OwnedRouting routing = test::random_routing(seed, c.tokens, 5, 3, 0.1);
    const auto want = test::oracle_moe(p, w.view(), x.view(), routing.ids.view(),
                                       routing.weights.view(), {}, {.round_like_scheme = true});
    for (const std::string& tier : tiers()) {
      const auto experts = make(tier, p, w);
      const Tensor y = run_standard(*experts, p, x.view(), routing, DType::kF32);
      const auto cmp = test::compare(test::to_doubles(y.view()), want);
      EXPECT_LE(cmp.rel_l2, bound_like_scheme(c.quant))
          << tier << " " << c.quant << " H " << c.h << " I " << c.i << ": " << cmp.describe;
    }
  }
}

// The kernels hold tables in bf16: the entries of nf4 are rounded there, which fp32 arithmetic must
// not be; those of IQ4 are small integers.
TEST(CpuExperts, Fp32ArithmeticTakesTheTablesThatAreExact) {
  const auto format = [](const char* name) {
    return experts::cpu_weight_format(
        with_activation(test::scheme_called(name),
                        quant_scheme_from_name("f32").value().activation),
        *cpu::kernels_by_name("baseline").value());
  };
  EXPECT_TRUE(format("iq4").ok()) << format("iq4").status().message();
  test::expect_refusal(format("nf4-bf16").status(), StatusCode::kUnsupported, {"code table"});
  test::expect_refusal(format("fp4-bf16").status(), StatusCode::kUnsupported, {"code table"});
}

// scale_fmt "ue8m0" of DeepSeek-V3.1: activation scales are powers of two.
TEST(CpuExperts, PowerOfTwoActivationScales) {
  for (const char* quant : {"fp8-block", "fp8-block-64x64", "fp8-block-64x96"}) {
    MoeProblem p = make_problem(quant, 256, 128, 4, 2);
    const OwnedExpertWeights w = test::random_expert_weights(71, p);
    test::Rng rng(72);
    const Tensor x = test::random_normal(rng, DType::kBF16, {9, 256});
    const OwnedRouting routing = test::random_routing(73, 9, 4, 2);
    const auto plain = test::oracle_moe(p, w.view(), x.view(), routing.ids.view(),
                                        routing.weights.view(), {}, {.round_like_scheme = true});
    p.quant.activation.scale_format = ScaleFormat::kE8M0;
    const auto want = test::oracle_moe(p, w.view(), x.view(), routing.ids.view(),
                                       routing.weights.view(), {}, {.round_like_scheme = true});
    for (const std::string& tier : tiers()) {
      const Tensor y = run_standard(*make(tier, p, w), p, x.view(), routing, DType::kF32);
      const auto got = test::to_doubles(y.view());
      EXPECT_LE(test::compare(got, want).rel_l2, bound_like_scheme(quant)) << tier << " " << quant;
      EXPECT_GT(test::compare(got, plain).rel_l2, 1e-2)
          << tier << " " << quant << ": the format made no difference";
    }
  }
}

// Blocks of any size are computed, by the reference where the kernels' units do not fit.
TEST(CpuExperts, BlocksThatAreNoMultipleOfTheKernelsUnitAreTheReferences) {
  MoeProblem p = make_problem("fp8-block-8x24", 96, 48, 4, 2);
  test::expect_refusal(experts::cpu_experts_can_implement("baseline", p), StatusCode::kUnsupported,
                       {"got blocks of 24 columns", "a multiple of 16"});
  EXPECT_EQ(choose_experts(p).value()->name, "cpu_reference");
  p.quant = test::scheme_called("fp8-block-8x48");
  EXPECT_NE(choose_experts(p).value()->name, "cpu_reference");
}

// Integers small enough that every product and partial sum is exact: all tiers and the oracle agree
// by bits.
TEST(CpuExperts, IntegerInputsAreExactOnEveryTier) {
  for (const char* quant : {"f32", "bf16", "f16"}) {
    MoeProblem p = make_problem(quant, 72, 40, 4, 2);
    p.activation.kind = ActivationKind::kRelu2NoMul;
    test::Rng rng(11);
    OwnedExpertWeights w;
    const DType d = p.quant.weight.dtype;
    // Few non-zeros keep relu^2 below 2^8, exact also after rounding to bf16.
    const auto sparse = [&](const Shape& shape) {
      Tensor t = test::random_integers(rng, d, shape, 1);
      const std::int64_t n = shape.num_elements().value();
      const std::int64_t width = dtype_bits(d) / 8;
      for (std::int64_t i = 0; i < n; ++i) {
        if (rng.integer(0, 7) != 0)
          std::memset(t.data() + i * width, 0, static_cast<std::size_t>(width));
      }
      return t;
    };
    w.w13 = sparse({4, 40, 72});
    w.w2 = sparse({4, 72, 40});
    const Tensor x = test::random_integers(rng, p.activation_dtype, {19, 72}, 1);
    OwnedRouting routing = test::random_routing(3, 19, 4, 2);
    for (std::int64_t i = 0; i < 38; ++i)
      routing.weights.as<float>()[i] = static_cast<float>(1 + i % 3);
    const auto want = test::oracle_moe(p, w.view(), x.view(), routing.ids.view(),
                                       routing.weights.view(), {}, {.round_like_scheme = true});
    for (const std::string& tier : tiers()) {
      const auto experts = make(tier, p, w);
      const Tensor y = run_standard(*experts, p, x.view(), routing, DType::kF32);
      const auto got = test::to_doubles(y.view());
      double energy = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], want[i]) << tier << " " << quant << " element " << i;
        energy += got[i] * got[i];
      }
      EXPECT_GT(energy, 1.0);
    }
  }
}

// One row alone, in any batch, in any order, with any number of threads: the same bits.
TEST(CpuExperts, RowsDependOnNothingButThemselves) {
  for (const char* quant : {"bf16",
                            "fp8-block",
                            "fp8-bf16",
                            "mxfp4-bf16",
                            "f32",
                            "fp8-channel",
                            "mxfp8",
                            "nvfp4",
                            "int8",
                            "int4-g128",
                            "gptq",
                            "mxfp4-fp8",
                            "int4-fp8",
                            "fp8-static",
                            "mxfp4-static",
                            "int4-fp8-static",
                            "int4-fp8-g32",
                            "int4-g128-int8",
                            "awq-int8",
                            "mxfp4-int8",
                            "q6k-int8",
                            "q4k-super",
                            "q6k-super",
                            "fp8-block-64x64",
                            "fp8-block-32x96"}) {
    MoeProblem p = make_problem(quant, 256, 128, 6, 2);
    const OwnedExpertWeights w = test::random_expert_weights(5, p);
    test::Rng rng(6);
    constexpr std::int64_t kTokens = 131;  // more rows per expert than one tile block
    const Tensor x = test::random_normal(rng, p.activation_dtype, {kTokens, 256});
    const OwnedRouting routing = test::random_routing(7, kTokens, 6, 2);
    for (const std::string& tier : tiers()) {
      p.num_threads = 2;
      const auto experts = make(tier, p, w);
      const Tensor all = run_standard(*experts, p, x.view(), routing, DType::kF32);
      p.num_threads = 1;
      const auto single = make(tier, p, w);
      std::string why;
      const Tensor one_thread = run_standard(*single, p, x.view(), routing, DType::kF32);
      EXPECT_TRUE(test::same_bits(one_thread.view(), all.view(), &why))
          << tier << " " << quant << " " << why;
      const std::int64_t elem = dtype_bits(x.dtype()) / 8;
      for (const std::int64_t t : {std::int64_t{0}, std::int64_t{5}, kTokens - 1}) {
        const ConstTensorView row(x.data() + t * 256 * elem, x.dtype(), {1, 256});
        OwnedRouting r1;
        r1.ids = Tensor::zeros(DType::kI32, {1, 2}).value();
        r1.weights = Tensor::zeros(DType::kF32, {1, 2}).value();
        std::memcpy(r1.ids.data(), routing.ids.as<std::int32_t>() + 2 * t, 8);
        std::memcpy(r1.weights.data(), routing.weights.as<float>() + 2 * t, 8);
        const Tensor y = run_standard(*experts, p, row, r1, DType::kF32);
        const ConstTensorView want(all.data() + t * 256 * 4, DType::kF32, {1, 256});
        EXPECT_TRUE(test::same_bits(y.view(), want, &why))
            << tier << " " << quant << " token " << t << " " << why;
      }
    }
  }
}

TEST(CpuExperts, BiasesGatedActivationsAndWeightOnInput) {
  for (const ActivationKind kind :
       {ActivationKind::kSilu, ActivationKind::kSwigluOai, ActivationKind::kSwigluStep,
        ActivationKind::kGelu, ActivationKind::kGeluTanh}) {
    MoeProblem p = make_problem("bf16", 96, 70, 3, 1);
    p.has_expert_bias = true;
    p.apply_router_weight_on_input = true;
    p.activation.kind = kind;
    if (kind == ActivationKind::kSwigluOai) p.activation = {kind, 7.0F, 1.702F, 1.0F, 0.0F};
    if (kind == ActivationKind::kSwigluStep) p.activation.limit = 7.0F;
    const OwnedExpertWeights w = test::random_expert_weights(21, p);
    test::Rng rng(22);
    const Tensor x = test::random_normal(rng, DType::kBF16, {13, 96}, 2.0);
    const OwnedRouting routing = test::random_routing(23, 13, 3, 1);
    const auto want = test::oracle_moe(p, w.view(), x.view(), routing.ids.view(),
                                       routing.weights.view(), {}, {.round_like_scheme = true});
    for (const std::string& tier : tiers()) {
      const auto experts = make(tier, p, w);
      const Tensor y = run_standard(*experts, p, x.view(), routing, DType::kF32);
      const auto cmp = test::compare(test::to_doubles(y.view()), want);
      EXPECT_LE(cmp.rel_l2, 3e-3) << tier << " " << activation_name(kind) << ": " << cmp.describe;
    }
  }
}

// Llama 4 with two experts per token: each sees the row times its own weight.
TEST(CpuExperts, EverySlotHasItsOwnWeightOnTheInput) {
  for (const char* quant : {"f32", "bf16", "fp8-block", "fp8-tensor", "int4-g128", "awq-int8"}) {
    MoeProblem p = make_problem(quant, 128, 256, 4, 2);
    p.apply_router_weight_on_input = true;
    const OwnedExpertWeights w = test::random_expert_weights(41, p);
    test::Rng rng(42);
    const Tensor x = test::random_normal(rng, DType::kBF16, {9, 128}, 2.0);
    const OwnedRouting routing = test::random_routing(43, 9, 4, 2);
    const auto want = test::oracle_moe(p, w.view(), x.view(), routing.ids.view(),
                                       routing.weights.view(), {}, {.round_like_scheme = true});
    for (const std::string& tier : tiers()) {
      const auto experts = make(tier, p, w);
      const Tensor y = run_standard(*experts, p, x.view(), routing, DType::kF32);
      const auto cmp = test::compare(test::to_doubles(y.view()), want);
      EXPECT_LE(cmp.rel_l2, 3e-3) << tier << " " << quant << ": " << cmp.describe;
    }
  }
}

TEST(CpuExperts, ExpertMapsSplitTheSumAndRemoteTokensAreExactZeros) {
  const MoeProblem whole = make_problem("bf16", 128, 64, 6, 3);
  const OwnedExpertWeights w = test::random_expert_weights(31, whole);
  test::Rng rng(32);
  const Tensor x = test::random_normal(rng, DType::kBF16, {21, 128});
  const OwnedRouting routing = test::random_routing(33, 21, 6, 3);
  const std::string tier = tiers().front();
  const Tensor want = run_standard(*make(tier, whole, w), whole, x.view(), routing, DType::kF32);
  std::vector<double> sum(21 * 128, 0.0);
  for (int rank = 0; rank < 2; ++rank) {
    MoeProblem p = whole;
    p.num_local_experts = 3;
    const std::vector<std::int32_t> map = rank == 0
                                              ? std::vector<std::int32_t>{0, 1, 2, -1, -1, -1}
                                              : std::vector<std::int32_t>{-1, -1, -1, 0, 1, 2};
    StackedExpertWeights part = w.view();
    const auto half = [&](ConstTensorView t) {
      const std::int64_t bytes = contiguous_bytes(t.dtype, t.shape).value() / 2;
      return ConstTensorView(t.data + rank * bytes, t.dtype, {3, t.dim(1), t.dim(2)});
    };
    part.w13 = half(part.w13);
    part.w2 = half(part.w2);
    const auto source = make_stacked_source(part);
    const auto experts = experts::make_cpu_experts(tier, p, *source);
    ASSERT_TRUE(experts.ok()) << experts.status().to_string();
    const Tensor y = run_standard(**experts, p, x.view(), routing, DType::kF32, map);
    const auto got = test::to_doubles(y.view());
    for (std::size_t i = 0; i < got.size(); ++i) sum[i] += got[i];
    for (std::int64_t t = 0; t < 21; ++t) {
      bool any = false;
      for (int j = 0; j < 3; ++j)
        any |= map[static_cast<std::size_t>(routing.ids.as<std::int32_t>()[t * 3 + j])] >= 0;
      if (any) continue;
      for (std::size_t h = 0; h < 128; ++h)
        EXPECT_EQ(got[static_cast<std::size_t>(t) * 128 + h], 0.0);
    }
  }
  EXPECT_LE(test::compare(sum, test::to_doubles(want.view())).rel_l2, 1e-6);
}

TEST(CpuExperts, BatchedFormatLeavesRowsPastTheCountsAlone) {
  for (const char* quant : {"bf16", "fp8-block", "mxfp4-bf16", "awq-int8"}) {
    MoeProblem p = make_problem(quant, 128, 128, 4, 2);
    p.format = ActivationFormat::kBatched;
    p.max_tokens = 9;
    const OwnedExpertWeights w = test::random_expert_weights(41, p);
    test::Rng rng(42);
    const Tensor x = test::random_normal(rng, DType::kBF16, {4, 9, 128});
    const std::vector<std::int32_t> counts = {3, 0, 9, 1};
    const auto want =
        test::oracle_batched(p, w.view(), x.view(), counts, {.round_like_scheme = true});
    for (const std::string& tier : tiers()) {
      const auto experts = make(tier, p, w);
      Tensor y = Tensor::uninitialized(DType::kF32, {4, 9, 128}).value();
      test::poison(y.view());
      Workspace ws(experts->workspace_size(9).value());
      const Status s = experts->run({.hidden_states = x.view(),
                                     .topk_ids = {},
                                     .topk_weights = {},
                                     .expert_map = {},
                                     .expert_num_tokens = counts,
                                     .workspace = ws.span(),
                                     .output = y.view()});
      ASSERT_TRUE(s.ok()) << s.to_string();
      std::vector<double> got, ref;
      for (std::size_t e = 0; e < 4; ++e) {
        for (std::size_t r = 0; r < 9; ++r) {
          for (std::size_t h = 0; h < 128; ++h) {
            const std::size_t at = (e * 9 + r) * 128 + h;
            if (r < static_cast<std::size_t>(counts[e])) {
              got.push_back(y.as<float>()[at]);
              ref.push_back(want[at]);
            } else {
              std::uint32_t bits = 0;
              std::memcpy(&bits, y.as<float>() + at, 4);
              ASSERT_EQ(bits, 0xFFFFFFFFU) << "row past the count was written";
            }
          }
        }
      }
      const auto cmp = test::compare(got, ref);
      EXPECT_LE(cmp.rel_l2, bound_like_scheme(quant))
          << tier << " " << quant << ": " << cmp.describe;
    }
  }
}

TEST(CpuExperts, NanStaysInItsRow) {
  for (const char* quant :
       {"bf16", "fp8-block", "mxfp4-bf16", "int4-g128-int8", "awq-int8", "mxfp4-int8"}) {
    const MoeProblem p = make_problem(quant, 128, 128, 3, 1);
    const OwnedExpertWeights w = test::random_expert_weights(51, p);
    test::Rng rng(52);
    Tensor x = test::random_normal(rng, DType::kBF16, {8, 128});
    x.as<std::uint16_t>()[3 * 128 + 17] = 0x7FC0;
    const OwnedRouting routing = test::random_routing(53, 8, 3, 1);
    for (const std::string& tier : tiers()) {
      const Tensor y = run_standard(*make(tier, p, w), p, x.view(), routing, DType::kF32);
      for (std::int64_t t = 0; t < 8; ++t) {
        bool nan = false;
        for (std::int64_t h = 0; h < 128; ++h) nan |= std::isnan(y.as<float>()[t * 128 + h]);
        EXPECT_EQ(nan, t == 3) << tier << " " << quant << " token " << t;
      }
    }
  }
}

TEST(CpuExperts, ZeroTokensAndTooSmallWorkspace) {
  const MoeProblem p = make_problem("bf16", 64, 64, 2, 1);
  const OwnedExpertWeights w = test::random_expert_weights(61, p);
  const auto experts = make(tiers().front(), p, w);
  Tensor y = Tensor::zeros(DType::kBF16, {0, 64}).value();
  const Tensor ids = Tensor::zeros(DType::kI32, {0, 1}).value();
  const Tensor weights = Tensor::zeros(DType::kF32, {0, 1}).value();
  const Tensor none = Tensor::zeros(DType::kBF16, {0, 64}).value();
  EXPECT_TRUE(experts
                  ->run({.hidden_states = none.view(),
                         .topk_ids = ids.view(),
                         .topk_weights = weights.view(),
                         .expert_map = {},
                         .expert_num_tokens = {},
                         .workspace = {},
                         .output = y.view()})
                  .ok());
  const Tensor x = Tensor::zeros(DType::kBF16, {2, 64}).value();
  const OwnedRouting routing = test::random_routing(1, 2, 2, 1);
  Tensor y2 = Tensor::zeros(DType::kBF16, {2, 64}).value();
  Workspace ws(128);
  const Status s = experts->run({.hidden_states = x.view(),
                                 .topk_ids = routing.ids.view(),
                                 .topk_weights = routing.weights.view(),
                                 .expert_map = {},
                                 .expert_num_tokens = {},
                                 .workspace = ws.span(),
                                 .output = y2.view()});
  EXPECT_EQ(s.code(), StatusCode::kWorkspaceTooSmall) << s.to_string();
}

}  // namespace
}  // namespace moesaic
