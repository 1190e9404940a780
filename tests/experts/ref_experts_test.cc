// Properties of an experts backend, checked on every row of the catalogue that accepts the problem.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::compare;
using test::make_backend;
using test::make_case;
using test::run_standard;
using test::small_problem;
using test::StandardCase;
using test::to_doubles;

std::vector<std::string> accepting(const MoeProblem& problem) {
  std::vector<std::string> names;
  for (const CandidateReport& r : explain_experts(problem)) {
    if (r.accepted) names.push_back(r.name);
  }
  return names;
}

// Against float64 on operands rounded and quantised as the scheme says. What is left is the order
// of fp32 sums (eps * sqrt(H)), and operands that land on the other side of a rounding boundary:
// one ulp of bf16 or f16, or one code of e4m3, in a small share of the intermediate.
double same_operands_bound(std::string_view quant) {
  if (quant == "f32") return 1e-6;
  const Scheme scheme = test::scheme_called(quant);
  if (scheme.activation.dtype == DType::kF4E2M1) return 2e-2;
  return scheme.weight_only() ? 3e-4 : 3e-3;
}

constexpr const char* kSchemes[] = {"f32",
                                    "bf16",
                                    "f16",
                                    "fp8-block",
                                    "fp8-bf16",
                                    "mxfp4-bf16",
                                    "fp8-tensor",
                                    "fp8-static",
                                    "fp8-channel",
                                    "mxfp8",
                                    "mxfp4-fp8",
                                    "mxfp4",
                                    "nvfp4",
                                    "int4-fp8",
                                    "int8",
                                    "int4-g128",
                                    "int8-bf16",
                                    "nvfp4-bf16",
                                    "nvfp4-rows",
                                    "nf4-bf16",
                                    "fp4-bf16",
                                    "gptq",
                                    "int4-channel",
                                    "q4k",
                                    "q6k",
                                    "u8-zero",
                                    "iq4",
                                    "mxfp4-static",
                                    "mxfp4-f32-groups",
                                    "mxfp4-token",
                                    "awq-int8",
                                    "mxfp4-int8",
                                    "gptq-int8",
                                    "q4k-int8",
                                    "q6k-int8",
                                    "int4-channel-int8",
                                    "fp8-block-64x64",
                                    "fp8-block-5x7",
                                    "fp8-bf16-48x80"};

struct Variant {
  std::string quant, activation;
  bool bias;
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const char* quant : kSchemes) {
    all.push_back({quant, "silu", false});
    all.push_back({quant, "relu2_no_mul", true});
  }
  for (const char* quant : {"f32", "bf16", "f16", "fp8-block", "mxfp4-bf16", "int8"}) {
    for (const char* activation : {"silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ",
                                   "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul"}) {
      all.push_back({quant, activation, true});
    }
  }
  return all;
}

MoeProblem problem_of(const Variant& v) {
  MoeProblem p = small_problem(v.quant);
  ActivationParams params;
  if (v.activation == "situ") {
    params.beta = 4.0F;
    params.up_limit = 25.0F;
  }
  p.activation = make_activation(v.activation, params).value();
  p.has_expert_bias = v.bias;
  return p;
}

class ExpertsAccuracy : public testing::TestWithParam<Variant> {};

TEST_P(ExpertsAccuracy, StaysWithinTheBoundsAgainstFloat64) {
  const MoeProblem problem = problem_of(GetParam());
  const StandardCase c = make_case(11, problem, 9, problem.activation_dtype, 0.1);
  const auto same_operands = c.oracle(true);
  const auto exact = c.oracle(false);
  for (const std::string& name : accepting(problem)) {
    const auto got = to_doubles(run_standard(*make_backend(name, c), c).view());
    const auto near = compare(got, same_operands);
    EXPECT_LE(near.rel_l2, same_operands_bound(GetParam().quant)) << name << ": " << near.describe;
    const auto far = compare(got, exact);
    // output_bound is for silu-like layers; pointwise squares double a relative error.
    const double factor = GetParam().activation == "relu2_no_mul" ? 2.0 : 1.0;
    EXPECT_LE(far.rel_l2, factor * problem.quant.output_bound) << name << ": " << far.describe;
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, ExpertsAccuracy, testing::ValuesIn(variants()),
                         [](const auto& param) {
                           std::string name = param.param.quant + "_" + param.param.activation +
                                              (param.param.bias ? "_bias" : "");
                           for (char& ch : name) ch = ch == '-' ? '_' : ch;
                           return name;
                         });

class ExpertsScheme : public testing::TestWithParam<const char*> {
 protected:
  MoeProblem problem() const { return small_problem(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Schemes, ExpertsScheme, testing::ValuesIn(kSchemes),
                         [](const auto& param) {
                           std::string name = param.param;
                           for (char& ch : name) ch = ch == '-' ? '_' : ch;
                           return name;
                         });

// Rows `order` of a case. Weights stay behind: a backend that is bound to them runs it.
StandardCase select_rows(const StandardCase& c, const std::vector<std::int64_t>& order) {
  const auto rows = static_cast<std::int64_t>(order.size());
  StandardCase s;
  s.problem = c.problem;
  s.expert_map = c.expert_map;
  const auto copy = [&](const Tensor& from) {
    Tensor to = Tensor::uninitialized(from.dtype(), {rows, from.shape()[1]}).value();
    const std::int64_t bytes = from.bytes() / from.shape()[0];
    for (std::size_t i = 0; i < order.size(); ++i) {
      std::copy_n(from.data() + order[i] * bytes, bytes,
                  to.data() + static_cast<std::int64_t>(i) * bytes);
    }
    return to;
  };
  s.hidden_states = copy(c.hidden_states);
  s.routing.ids = copy(c.routing.ids);
  s.routing.weights = copy(c.routing.weights);
  return s;
}

TEST_P(ExpertsScheme, BitsOfARowDoNotDependOnBatchOrOrderOrThreads) {
  const StandardCase c = make_case(21, problem(), 7, DType::kBF16, 0.2);
  StandardCase threaded = make_case(21, problem(), 7, DType::kBF16, 0.2);
  threaded.problem.num_threads = 3;
  for (const std::string& name : accepting(c.problem)) {
    const auto backend = make_backend(name, c);
    const Tensor all = run_standard(*backend, c);
    std::string why;
    EXPECT_TRUE(test::same_bits(run_standard(*make_backend(name, threaded), threaded).view(),
                                all.view(), &why))
        << name << " with three threads: " << why;
    const Tensor back = run_standard(*backend, select_rows(c, {6, 5, 4, 3, 2, 1, 0}));
    const std::int64_t row = all.bytes() / 7;
    for (std::int64_t t = 0; t < 7; ++t) {
      const std::byte* want = all.data() + t * row;
      EXPECT_TRUE(std::equal(want, want + row, back.data() + (6 - t) * row))
          << name << " token " << t << " reversed";
      const Tensor single = run_standard(*backend, select_rows(c, {t}));
      EXPECT_TRUE(std::equal(want, want + row, single.data()))
          << name << " token " << t << " alone";
    }
  }
}

TEST_P(ExpertsScheme, DoublingTheRouterWeightsDoublesTheResultExactly) {
  const StandardCase c = make_case(31, problem(), 5, DType::kBF16);
  for (const std::string& name : accepting(c.problem)) {
    const auto backend = make_backend(name, c);
    const Tensor once = run_standard(*backend, c);
    StandardCase d = select_rows(c, {0, 1, 2, 3, 4});
    for (int i = 0; i < 10; ++i) d.routing.weights.as<float>()[i] *= 2.0F;
    const Tensor twice = run_standard(*backend, d);
    for (std::int64_t i = 0; i < 5 * c.problem.hidden_size; ++i) {
      ASSERT_EQ(twice.as<float>()[i], 2.0F * once.as<float>()[i]) << name << " element " << i;
    }
  }
}

TEST_P(ExpertsScheme, RelabellingExpertsChangesNothing) {
  const MoeProblem p = problem();
  const StandardCase c = make_case(41, p, 6, DType::kBF16);
  // The same weights seen through an expert map: id e lives at local index map[e].
  StandardCase d = select_rows(c, {0, 1, 2, 3, 4, 5});
  d.expert_map = {2, 0, 1, 5, 3, 4};
  for (std::int64_t i = 0; i < 12; ++i) {
    std::int32_t& id = d.routing.ids.as<std::int32_t>()[i];
    const auto at = std::find(d.expert_map.begin(), d.expert_map.end(), id);
    id = static_cast<std::int32_t>(at - d.expert_map.begin());
  }
  for (const std::string& name : accepting(p)) {
    const auto backend = make_backend(name, c);
    std::string why;
    EXPECT_TRUE(
        test::same_bits(run_standard(*backend, d).view(), run_standard(*backend, c).view(), &why))
        << name << ": " << why;
  }
}

// Rank `rank` of `size` with a contiguous share of six experts.
StandardCase rank_case(const StandardCase& whole, std::int64_t rank, std::int64_t size) {
  StandardCase c = select_rows(whole, {0, 1, 2, 3, 4, 5, 6, 7});
  const std::int64_t local = whole.problem.num_experts / size;
  c.problem.num_local_experts = local;
  c.expert_map.assign(static_cast<std::size_t>(whole.problem.num_experts), -1);
  for (std::int64_t e = 0; e < local; ++e) {
    c.expert_map[static_cast<std::size_t>(rank * local + e)] = static_cast<std::int32_t>(e);
  }
  return c;
}
StackedExpertWeights rank_weights(const StandardCase& whole, std::int64_t first,
                                  std::int64_t count) {
  StackedExpertWeights w = whole.weights.view();
  for (ConstTensorView* t :
       {&w.w13, &w.w13_scale, &w.w13_bias, &w.w2, &w.w2_scale, &w.w2_bias, &w.w13_global_scale,
        &w.w2_global_scale, &w.w13_channel_scale, &w.w2_channel_scale, &w.w13_zero, &w.w2_zero,
        &w.w13_min, &w.w2_min, &w.w13_input_scale, &w.w2_input_scale, &w.w13_perm, &w.w2_perm}) {
    if (!t->present()) continue;
    t->data += first * t->strides[0] * dtype_bits(t->dtype) / 8;
    std::vector<std::int64_t> dims(t->shape.dims().begin(), t->shape.dims().end());
    dims[0] = count;
    t->shape = Shape::from(dims).value();
  }
  return w;
}

TEST_P(ExpertsScheme, PartialResultsOfAllRanksAddUp) {
  MoeProblem p = problem();
  p.has_expert_bias = true;
  const StandardCase c = make_case(51, p, 8, DType::kBF16);
  for (const std::string& name : accepting(p)) {
    const auto want = to_doubles(run_standard(*make_backend(name, c), c).view());
    std::vector<double> sum(want.size());
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      const StandardCase r = rank_case(c, rank, 3);
      const auto source = make_stacked_source(rank_weights(c, 2 * rank, 2));
      const ExpertsBackend* row = choose_experts(r.problem, name).value();
      const auto experts = row->create(r.problem, *source).value();
      const Tensor part = run_standard(*experts, r);
      for (std::int64_t t = 0; t < 8; ++t) {
        bool owns = false;
        for (std::int64_t j = 0; j < p.top_k; ++j) {
          const std::int32_t id = c.routing.ids.as<std::int32_t>()[t * p.top_k + j];
          owns |= r.expert_map[static_cast<std::size_t>(id)] >= 0;
        }
        for (std::int64_t h = 0; h < p.hidden_size; ++h) {
          const float v = part.as<float>()[t * p.hidden_size + h];
          if (!owns) {
            ASSERT_EQ(v, 0.0F) << name << " rank " << rank << " owns nothing of " << t;
          }
          sum[static_cast<std::size_t>(t * p.hidden_size + h)] += static_cast<double>(v);
        }
      }
    }
    const auto result = compare(sum, want);
    EXPECT_LE(result.rel_l2, 1e-6) << name << ": " << result.describe;
  }
}

TEST_P(ExpertsScheme, SlotsWithoutAnExpertAndZeroTokensAreOrdinary) {
  MoeProblem p = problem();
  p.has_expert_bias = true;
  StandardCase c = make_case(61, p, 3, DType::kBF16);
  for (int i = 0; i < 2; ++i) c.routing.ids.as<std::int32_t>()[2 + i] = -1;  // token 1: nothing
  // A weight of NaN on a slot without an expert must not reach the result.
  c.routing.weights.as<float>()[2] = std::numeric_limits<float>::quiet_NaN();
  const StandardCase empty = make_case(61, p, 0, DType::kBF16);
  for (const std::string& name : accepting(p)) {
    const auto backend = make_backend(name, c);
    const Tensor out = run_standard(*backend, c);
    for (std::int64_t h = 0; h < p.hidden_size; ++h) {
      ASSERT_EQ(out.as<float>()[p.hidden_size + h], 0.0F) << name;
      ASSERT_NE(out.as<float>()[h], 0.0F) << name;
    }
    EXPECT_EQ(run_standard(*backend, empty).bytes(), 0);
  }
}

TEST_P(ExpertsScheme, TheSameExpertTwiceInARowCountsTwice) {
  StandardCase c = make_case(71, problem(), 4, DType::kBF16);
  for (int t = 0; t < 4; ++t)
    c.routing.ids.as<std::int32_t>()[2 * t + 1] = c.routing.ids.as<std::int32_t>()[2 * t];
  const auto want = c.oracle(true);
  for (const std::string& name : accepting(c.problem)) {
    const auto result = compare(to_doubles(run_standard(*make_backend(name, c), c).view()), want);
    EXPECT_LE(result.rel_l2, same_operands_bound(GetParam())) << name << ": " << result.describe;
  }
}

TEST_P(ExpertsScheme, ReadsRowsThatAreApart) {
  const StandardCase c = make_case(81, problem(), 4, DType::kBF16);
  const std::int64_t hidden = c.problem.hidden_size;
  Tensor wide = Tensor::uninitialized(DType::kBF16, {4, hidden + 24}).value();
  test::poison(wide.view());
  for (std::int64_t t = 0; t < 4; ++t) {
    std::copy_n(c.hidden_states.as<std::uint16_t>() + t * hidden, hidden,
                wide.as<std::uint16_t>() + t * (hidden + 24) + 8);
  }
  for (const std::string& name : accepting(c.problem)) {
    const auto backend = make_backend(name, c);
    const Tensor want = run_standard(*backend, c);
    Tensor workspace = test::poisoned_bytes(backend->workspace_size(4).value());
    Tensor output = Tensor::zeros(DType::kF32, {4, hidden}).value();
    ExpertsArgs args;
    args.hidden_states = ConstTensorView(wide.data() + 16, DType::kBF16, {4, hidden});
    args.hidden_states.strides[0] = hidden + 24;
    args.topk_ids = c.routing.ids.view();
    args.topk_weights = c.routing.weights.view();
    args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
    args.output = output.view();
    ASSERT_TRUE(backend->run(args).ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(output.view(), want.view(), &why)) << name << ": " << why;
  }
}

TEST_P(ExpertsScheme, TheOutputDTypeIsOneRoundingOfTheF32Result) {
  const StandardCase c = make_case(91, problem(), 5, DType::kBF16);
  for (const std::string& name : accepting(c.problem)) {
    const auto backend = make_backend(name, c);
    const auto wide = to_doubles(run_standard(*backend, c).view());
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const auto narrow = to_doubles(run_standard(*backend, c, dtype).view());
      // Half an ulp of the narrow format around each value.
      const double half_ulp = dtype == DType::kBF16 ? 0x1p-9 : 0x1p-12;
      for (std::size_t i = 0; i < wide.size(); ++i) {
        ASSERT_LE(std::abs(narrow[i] - wide[i]), half_ulp * 2 * std::abs(wide[i]) + 0x1p-25)
            << name;
      }
    }
  }
}

TEST_P(ExpertsScheme, BatchedRowsEqualStandardRowsOfWeightOne) {
  MoeProblem p = problem();
  p.top_k = 1;
  p.has_expert_bias = true;
  StandardCase c = make_case(101, p, 10, DType::kBF16);
  for (int t = 0; t < 10; ++t) c.routing.weights.as<float>()[t] = 1.0F;
  MoeProblem batched = p;
  batched.format = ActivationFormat::kBatched;
  batched.max_tokens = 10;
  const std::int64_t hidden = p.hidden_size;
  Tensor slabs = Tensor::uninitialized(DType::kBF16, {6, 10, hidden}).value();
  test::poison(slabs.view());  // rows past the counts stay NaN
  std::vector<std::int32_t> counts(6);
  std::vector<std::int64_t> row_of(10);
  for (int t = 0; t < 10; ++t) {
    const auto e = static_cast<std::size_t>(c.routing.ids.as<std::int32_t>()[t]);
    row_of[static_cast<std::size_t>(t)] = static_cast<std::int64_t>(e) * 10 + counts[e]++;
    std::copy_n(c.hidden_states.as<std::uint16_t>() + t * hidden, hidden,
                slabs.as<std::uint16_t>() + row_of[static_cast<std::size_t>(t)] * hidden);
  }
  for (const std::string& name : accepting(batched)) {
    const auto source = make_stacked_source(c.weights.view());
    const auto experts = choose_experts(batched, name).value()->create(batched, *source).value();
    EXPECT_TRUE(experts->reduction() == TopKWeightAndReduce::kNaiveBatched ||
                experts->reduction() == TopKWeightAndReduce::kDelegate);
    Tensor output = Tensor::uninitialized(DType::kF32, slabs.shape()).value();
    test::poison(output.view());
    Tensor workspace = test::poisoned_bytes(experts->workspace_size(10).value());
    ExpertsArgs args;
    args.hidden_states = slabs.view();
    args.expert_num_tokens = counts;
    args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
    args.output = output.view();
    ASSERT_TRUE(experts->run(args).ok());
    const auto want = test::oracle_batched(batched, c.weights.view(), slabs.view(), counts, {true});
    std::vector<double> got_rows, want_rows;
    for (const std::int64_t row : row_of) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        got_rows.push_back(static_cast<double>(output.as<float>()[row * hidden + h]));
        want_rows.push_back(want[static_cast<std::size_t>(row * hidden + h)]);
      }
    }
    const auto result = compare(got_rows, want_rows);
    EXPECT_LE(result.rel_l2, same_operands_bound(GetParam())) << name << ": " << result.describe;
    if (name != "cpu_reference") continue;  // the formats need not share bits elsewhere
    const auto standard = to_doubles(run_standard(*make_backend(name, c), c).view());
    EXPECT_EQ(got_rows, standard);
  }
}

TEST_P(ExpertsScheme, AWeightOnTheInputIsAppliedOnceAndBeforeTheExpert) {
  MoeProblem p = problem();
  p.top_k = 1;
  p.activation = make_activation("relu2_no_mul").value();
  p.apply_router_weight_on_input = true;
  StandardCase c = make_case(111, p, 6, DType::kBF16);
  for (int t = 0; t < 6; ++t) c.routing.weights.as<float>()[t] = 0.5F;  // exact in every dtype
  const auto want = c.oracle(true);
  for (const std::string& name : accepting(p)) {
    const auto backend = make_backend(name, c);
    const auto got = to_doubles(run_standard(*backend, c).view());
    const auto result = compare(got, want);
    EXPECT_LE(result.rel_l2, same_operands_bound(GetParam())) << name << ": " << result.describe;
    // A static scale does not follow the input.
    if (c.weights.w13_input_scale.present()) continue;
    // Squares: a weight of 1/2 on the input is 1/4 on the output, exactly in floating point.
    StandardCase one = select_rows(c, {0, 1, 2, 3, 4, 5});
    for (int t = 0; t < 6; ++t) one.routing.weights.as<float>()[t] = 1.0F;
    const auto full = to_doubles(run_standard(*backend, one).view());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], full[i] / 4) << name;
  }
}

TEST_P(ExpertsScheme, InputsOfEveryFloatDTypeAreTaken) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const StandardCase c = make_case(121, problem(), 4, dtype);
    const auto want = c.oracle(true);
    for (const std::string& name : accepting(c.problem)) {
      const auto result = compare(to_doubles(run_standard(*make_backend(name, c), c).view()), want);
      EXPECT_LE(result.rel_l2, same_operands_bound(GetParam())) << name << ": " << result.describe;
    }
  }
}

// The f32 scheme takes weights as they are stored, whatever they are.
TEST(ExpertsF32, ComputesOnEveryStoredFormat) {
  for (const char* stored : kSchemes) {
    MoeProblem p = small_problem(stored);
    p.quant = with_activation(p.quant, quant_scheme_from_name("f32").value().activation);
    const StandardCase c = make_case(131, p, 4, DType::kBF16);
    const auto want = c.oracle(false);
    for (const std::string& name : accepting(p)) {
      const auto result = compare(to_doubles(run_standard(*make_backend(name, c), c).view()), want);
      EXPECT_LE(result.rel_l2, 1e-6) << stored << " " << name << ": " << result.describe;
    }
  }
}

// scale_fmt "ue8m0": the run-time scales of activations are powers of two.
TEST(ExpertsFp8Block, HonoursPowerOfTwoActivationScales) {
  MoeProblem p = small_problem("fp8-block");
  p.quant.activation.scale_format = ScaleFormat::kE8M0;
  const StandardCase c = make_case(151, p, 6, DType::kBF16);
  const auto want = c.oracle(true);
  for (const std::string& name : accepting(p)) {
    const auto result = compare(to_doubles(run_standard(*make_backend(name, c), c).view()), want);
    EXPECT_LE(result.rel_l2, 3e-3) << name << ": " << result.describe;
  }
}

// The last block of a row, and of gate's and of up's rows, may be a part of one: on every backend the
// result is that of float64 on the same blocks.
TEST(ExpertsFp8Block, BlocksMayEndRagged) {
  for (const char* quant : {"fp8-block", "fp8-bf16"}) {
    for (const char* activation : {"silu", "relu2_no_mul"}) {
      for (const auto& [hidden, inner] :
           {std::pair<std::int64_t, std::int64_t>{200, 72}, {256, 192}, {50, 300}, {130, 100}}) {
        MoeProblem p = small_problem(quant);
        p.hidden_size = hidden;
        p.intermediate_size = inner;
        p.activation = make_activation(activation).value();
        const StandardCase c = make_case(153, p, 6, DType::kBF16);
        EXPECT_EQ(c.weights.w13_scale.shape()[1],
                  (is_gated(p.activation.kind) ? 2 : 1) * ((inner + 127) / 128));
        const auto want = c.oracle(true);
        for (const std::string& name : accepting(p)) {
          const auto got = run_standard(*make_backend(name, c), c);
          const auto result = compare(to_doubles(got.view()), want);
          EXPECT_LE(result.rel_l2, 3e-3) << quant << ' ' << activation << ' ' << hidden << 'x'
                                         << inner << ' ' << name << ": " << result.describe;
        }
      }
    }
  }
}

// Kernels count the groups of super-blocks from the start of each.
TEST(ExpertsSuperBlocks, AreComputedWhateverTheGroupOfInt8Rows) {
  for (const char* quant : {"q4k-super-int8", "q6k-super-int8"}) {
    for (const std::int64_t group : {32, 48, 64, 96, 112, 128}) {
      MoeProblem p = small_problem(quant);
      p.hidden_size = p.intermediate_size = 512;
      OperandQuant rows = p.quant.activation;
      rows.block_k = group;
      p.quant = with_activation(p.quant, rows);
      const StandardCase c = make_case(142, p, 9, DType::kBF16);
      const std::vector<double> want = c.oracle(false);
      for (const std::string& name : accepting(p)) {
        const Tensor got = run_standard(*make_backend(name, c), c);
        const auto result = compare(to_doubles(got.view()), want);
        EXPECT_LE(result.rel_l2, 0.03) << quant << ' ' << group << ' ' << name << result.describe;
      }
    }
  }
}

// And is none of its codes: int8, e4m3 and e2m1 would make a number of it.
TEST(ExpertsNaN, StaysInItsRow) {
  for (const char* quant : {"bf16", "fp8-block", "fp8-tensor", "fp8-channel", "int8", "mxfp8",
                            "mxfp4", "nvfp4", "int4-fp8", "int4-g128-int8"}) {
    const StandardCase clean = make_case(141, small_problem(quant), 3, DType::kBF16);
    StandardCase c = make_case(141, small_problem(quant), 3, DType::kBF16);
    c.hidden_states.as<std::uint16_t>()[c.problem.hidden_size + 5] = 0x7FC0;
    for (const std::string& name : accepting(c.problem)) {
      const Tensor got = run_standard(*make_backend(name, c), c);
      const Tensor want = run_standard(*make_backend(name, clean), clean);
      const std::int64_t h = c.problem.hidden_size;
      for (std::int64_t i = 0; i < 3 * h; ++i) {
        if (i / h == 1) {
          ASSERT_TRUE(std::isnan(got.as<float>()[i])) << name << ' ' << quant;
        } else {
          ASSERT_EQ(got.as<float>()[i], want.as<float>()[i]) << name << ' ' << quant;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
