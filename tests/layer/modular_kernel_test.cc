#include "moesaic/modular_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <functional>
#include <thread>

#include "core/checked.h"
#include "experts/problem_checks.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::compare;
using test::make_case;
using test::small_problem;
using test::StandardCase;
using test::to_doubles;

// What a test double saw.
struct Log {
  int experts = 0, finalize = 0;
  ConstTensorView expert_output;
};

// Experts whose output is w13-free: slot s of token t yields the row x[t] * (id + 1), unweighted.
class FakeExperts final : public Experts {
 public:
  FakeExperts(Log* log, TopKWeightAndReduce reduction, ActivationFormat format)
      : log_(log), reduction_(reduction), format_(format) {}
  std::string_view name() const override { return "fake"; }
  TopKWeightAndReduce reduction() const override { return reduction_; }
  ActivationFormat format() const override { return format_; }
  Result<std::int64_t> workspace_size(std::int64_t) const override { return std::int64_t{64}; }
  std::int64_t weight_bytes() const override { return 0; }
  std::string_view determinism() const override { return "fixed"; }
  Status run(const ExpertsArgs& a) const override {
    ++log_->experts;
    const std::int64_t hidden = a.hidden_states.dim(1);
    const std::int64_t k = a.topk_ids.dim(1);
    EXPECT_EQ(a.output.shape, (Shape{a.hidden_states.dim(0) * k, hidden}));
    for (std::int64_t s = 0; s < a.hidden_states.dim(0) * k; ++s) {
      const std::int32_t id = a.topk_ids.as<std::int32_t>()[s];
      for (std::int64_t h = 0; h < hidden; ++h) {
        a.output.as<float>()[s * hidden + h] =
            a.hidden_states.as<float>()[s / k * hidden + h] * static_cast<float>(id + 1);
      }
    }
    return {};
  }

 private:
  Log* log_;
  TopKWeightAndReduce reduction_;
  ActivationFormat format_;
};

// A transport that delivers nothing, as a high-throughput all-to-all may.
class NothingArrives final : public PrepareAndFinalize {
 public:
  explicit NothingArrives(Log* log) : log_(log) {}
  std::string_view name() const override { return "nothing_arrives"; }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Status attach(const Experts&) override { return {}; }
  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  std::int64_t max_dispatched_tokens(std::int64_t tokens) const override { return 2 * tokens; }
  Result<std::int64_t> workspace_size(std::int64_t) const override { return std::int64_t{0}; }
  Result<Prepared> prepare(const PrepareArgs& a) const override {
    Prepared p;
    p.hidden_states = ConstTensorView(nullptr, a.hidden_states.dtype, {0, a.hidden_states.dim(1)});
    return p;
  }
  Status finalize(const FinalizeArgs& a) const override {
    ++log_->finalize;
    log_->expert_output = a.expert_output;
    for (std::int64_t i = 0; i < a.output.dim(0) * a.output.dim(1); ++i)
      a.output.as<float>()[i] = 7;
    return {};
  }

 private:
  Log* log_;
};

MoeProblem in_format(const MoeProblem& problem, ActivationFormat format, std::int64_t rows) {
  MoeProblem p = problem;
  p.format = format;
  p.max_tokens = rows;
  return p;
}

ModularKernel make_kernel(const StandardCase& c, std::string_view backend, ActivationFormat format,
                          ModularKernel::Options options = {}) {
  const std::int64_t tokens = std::max<std::int64_t>(c.hidden_states.shape()[0], 1);
  const MoeProblem p = in_format(c.problem, format, tokens);
  const auto source = make_stacked_source(c.weights.view());
  const bool standard = format == ActivationFormat::kStandard;
  options.max_tokens = tokens;
  options.max_tokens_per_expert = standard ? 0 : tokens;
  auto experts = choose_experts(p, backend).value()->create(p, *source).value();
  auto pf =
      standard ? make_local_prepare_finalize(p).value() : make_batched_prepare_finalize(p).value();
  return ModularKernel::create(p, std::move(pf), std::move(experts), options).value();
}

ModularKernel::Args args_of(const StandardCase& c, Tensor& output) {
  return {c.hidden_states.view(), c.routing.weights.view(), c.routing.ids.view(), c.expert_map,
          output.view()};
}

Tensor run(ModularKernel& kernel, const StandardCase& c, DType dtype = DType::kF32) {
  Tensor output = Tensor::uninitialized(dtype, c.hidden_states.shape()).value();
  test::poison(output.view());
  const std::int64_t bytes = kernel.workspace_size(c.hidden_states.shape()[0]).value();
  Tensor workspace = Tensor::uninitialized(DType::kU8, {bytes}).value();
  test::poison(workspace.data(), bytes);
  ModularKernel::Args args = args_of(c, output);
  args.workspace = {workspace.data(), static_cast<std::size_t>(bytes)};
  const Status status = kernel.run(args);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return output;
}

std::vector<std::string> accepting(const MoeProblem& problem) {
  std::vector<std::string> names;
  for (const CandidateReport& r : explain_experts(problem)) {
    if (r.accepted) names.push_back(r.name);
  }
  return names;
}

constexpr ActivationFormat kFormats[] = {ActivationFormat::kStandard, ActivationFormat::kBatched};

TEST(ModularKernel, EveryPairOfHalvesReproducesTheReference) {
  for (const char* quant : {"f32", "bf16", "f16", "fp8-block", "fp8-bf16"}) {
    MoeProblem p = small_problem(quant);
    p.has_expert_bias = true;
    const StandardCase c = make_case(1, p, 6, DType::kBF16, 0.2);
    const auto want = c.oracle(true);
    const double bound = std::string_view(quant) == "f32"         ? 1e-6
                         : std::string_view(quant) == "fp8-block" ? 3e-3
                                                                  : 3e-4;
    for (const ActivationFormat format : kFormats) {
      for (const std::string& name : accepting(in_format(p, format, 6))) {
        ModularKernel kernel = make_kernel(c, name, format);
        const Tensor output = run(kernel, c);
        // The calling thread's floating-point mode reaches no sum.
        const int mode = std::fegetround();
        ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
        const Tensor upwards = run(kernel, c);
        std::fesetround(mode);
        std::string why;
        EXPECT_TRUE(test::same_bits(upwards.view(), output.view(), &why)) << name << ' ' << why;
        const auto result = compare(to_doubles(output.view()), want);
        EXPECT_LE(result.rel_l2, bound) << quant << " " << name << " format "
                                        << static_cast<int>(format) << ": " << result.describe;
      }
    }
  }
}

// The formats of the plain reference share every operation, so they share every bit.
TEST(ModularKernel, BatchedAndStandardReferenceAgreeBitByBit) {
  for (const bool on_input : {false, true}) {
    for (const char* quant : {"f32", "bf16", "fp8-block"}) {
      MoeProblem p = small_problem(quant);
      if (on_input) {
        p.top_k = 1;
        p.apply_router_weight_on_input = true;
      }
      const StandardCase c = make_case(2, p, 7, DType::kBF16, 0.2);
      ModularKernel standard = make_kernel(c, "cpu_reference", ActivationFormat::kStandard);
      ModularKernel batched = make_kernel(c, "cpu_reference", ActivationFormat::kBatched);
      std::string why;
      EXPECT_TRUE(test::same_bits(run(batched, c).view(), run(standard, c).view(), &why))
          << quant << (on_input ? " on input" : "") << ": " << why;
    }
  }
}

TEST(ModularKernel, TheWeightOnTheInputIsAppliedExactlyOnce) {
  MoeProblem p = small_problem("f32");
  p.top_k = 1;
  p.activation = make_activation("relu2_no_mul").value();
  p.apply_router_weight_on_input = true;
  StandardCase c = make_case(3, p, 5, DType::kBF16);
  for (const ActivationFormat format : kFormats) {
    for (const std::string& name : accepting(in_format(p, format, 5))) {
      ModularKernel kernel = make_kernel(c, name, format);
      for (int t = 0; t < 5; ++t) c.routing.weights.as<float>()[t] = 1.0F;
      const auto full = to_doubles(run(kernel, c).view());
      for (int t = 0; t < 5; ++t) c.routing.weights.as<float>()[t] = 0.5F;
      const auto half = to_doubles(run(kernel, c).view());
      for (std::size_t i = 0; i < full.size(); ++i) ASSERT_EQ(half[i], full[i] / 4) << name;
    }
  }
}

TEST(ModularKernel, ZeroTokensAndTokensWithoutALocalExpert) {
  for (const ActivationFormat format : kFormats) {
    StandardCase c = make_case(4, small_problem("bf16"), 3, DType::kBF16);
    ModularKernel kernel = make_kernel(c, "cpu_reference", format);
    const StandardCase empty = make_case(4, small_problem("bf16"), 0, DType::kBF16);
    EXPECT_EQ(run(kernel, empty).bytes(), 0);
    for (int i = 0; i < 6; ++i) c.routing.ids.as<std::int32_t>()[i] = -1;
    for (const double v : to_doubles(run(kernel, c).view())) ASSERT_EQ(v, 0.0);
  }
}

TEST(ModularKernel, PartialResultsOfAllRanksAddUpInBothFormats) {
  const StandardCase whole = make_case(5, small_problem("bf16"), 6, DType::kBF16);
  for (const ActivationFormat format : kFormats) {
    ModularKernel one = make_kernel(whole, "cpu_reference", format);
    const auto want = to_doubles(run(one, whole).view());
    std::vector<double> sum(want.size());
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      StandardCase c = make_case(5, small_problem("bf16"), 6, DType::kBF16);
      c.problem.num_local_experts = 3;
      for (Tensor* t : {&c.weights.w13, &c.weights.w2}) {  // experts 2i + rank: round robin
        Tensor part = Tensor::zeros(t->dtype(), {3, t->shape()[1], t->shape()[2]}).value();
        const std::int64_t bytes = t->bytes() / 6;
        for (std::int64_t e = 0; e < 3; ++e) {
          std::copy_n(t->data() + (2 * e + rank) * bytes, bytes, part.data() + e * bytes);
        }
        *t = std::move(part);
      }
      for (std::int32_t e = 0; e < 6; ++e) c.expert_map.push_back(e % 2 == rank ? e / 2 : -1);
      ModularKernel kernel = make_kernel(c, "cpu_reference", format);
      const auto part = to_doubles(run(kernel, c).view());
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    const auto result = compare(sum, want);
    EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
  }
}

TEST(ModularKernel, NothingDispatchedSkipsTheExpertsButNotFinalize) {
  Log log;
  MoeProblem p = small_problem("bf16");
  ModularKernel::Options options;
  options.max_tokens = 4;
  ModularKernel kernel =
      ModularKernel::create(p, std::make_unique<NothingArrives>(&log),
                            std::make_unique<FakeExperts>(&log, TopKWeightAndReduce::kNoOp,
                                                          ActivationFormat::kStandard),
                            options)
          .value();
  const StandardCase c = make_case(6, p, 4, DType::kBF16);
  const Tensor out = run(kernel, c);
  EXPECT_EQ(log.experts, 0);
  EXPECT_EQ(log.finalize, 1);
  EXPECT_EQ(log.expert_output.dtype, DType::kBF16);  // of the input
  EXPECT_EQ(log.expert_output.shape, (Shape{0, p.hidden_size}));
  EXPECT_EQ(out.as<float>()[0], 7.0F);
}

TEST(ModularKernel, ContiguousAndDelegatedExpertsAreReducedByFinalize) {
  MoeProblem p = small_problem("f32");
  const StandardCase c = make_case(7, p, 4, DType::kF32);
  for (const auto reduction : {TopKWeightAndReduce::kContiguous, TopKWeightAndReduce::kDelegate}) {
    Log log;
    ModularKernel::Options options;
    options.max_tokens = 4;
    ModularKernel kernel =
        ModularKernel::create(
            p, make_local_prepare_finalize(p).value(),
            std::make_unique<FakeExperts>(&log, reduction, ActivationFormat::kStandard), options)
            .value();
    const Tensor out = run(kernel, c);
    EXPECT_EQ(log.experts, 1);
    for (std::int64_t t = 0; t < 4; ++t) {
      double factor = 0;
      for (std::int64_t j = 0; j < 2; ++j) {
        factor += static_cast<double>(c.routing.weights.as<float>()[t * 2 + j]) *
                  (c.routing.ids.as<std::int32_t>()[t * 2 + j] + 1);
      }
      for (std::int64_t h = 0; h < p.hidden_size; ++h) {
        const double want =
            factor * static_cast<double>(c.hidden_states.as<float>()[t * p.hidden_size + h]);
        ASSERT_NEAR(static_cast<double>(out.as<float>()[t * p.hidden_size + h]), want,
                    1e-6 * std::abs(want));
      }
    }
  }
}

TEST(ModularKernel, InPlaceGivesTheSameBitsAndIsRefusedBesideSharedExperts) {
  const StandardCase c = make_case(8, small_problem("bf16"), 5, DType::kBF16);
  for (const ActivationFormat format : kFormats) {
    ModularKernel apart = make_kernel(c, "cpu_reference", format);
    const Tensor want = run(apart, c, DType::kBF16);
    ModularKernel::Options options;
    options.inplace = true;
    ModularKernel kernel = make_kernel(c, "cpu_reference", format, options);
    StandardCase copy = make_case(8, small_problem("bf16"), 5, DType::kBF16);
    ModularKernel::Args args = args_of(copy, copy.hidden_states);
    ASSERT_TRUE(kernel.run(args).ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(copy.hidden_states.view(), want.view(), &why)) << why;
    const Status refused = apart.run(args_of(copy, copy.hidden_states));
    EXPECT_EQ(refused.code(), StatusCode::kAliasing);
    // Overlapping without being the same tensor is never right.
    args.output.data += 2 * c.problem.hidden_size;
    args.output.shape = Shape{4, c.problem.hidden_size};
    args.hidden_states.shape = Shape{4, c.problem.hidden_size};
    args.topk_ids.shape = args.topk_weights.shape = Shape{4, 2};
    EXPECT_EQ(kernel.run(args).code(), StatusCode::kAliasing);
  }
  Log log;
  ModularKernel::Options both;
  both.max_tokens = 4;
  both.inplace = both.has_shared_experts = true;
  const MoeProblem p = small_problem("bf16");
  const auto kernel = ModularKernel::create(
      p, make_local_prepare_finalize(p).value(),
      std::make_unique<FakeExperts>(&log, TopKWeightAndReduce::kNoOp, ActivationFormat::kStandard),
      both);
  ASSERT_FALSE(kernel.ok());
  EXPECT_EQ(kernel.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(kernel.status().message().find("inplace"), std::string::npos);
}

TEST(ModularKernel, InputsAreNeverWritten) {
  MoeProblem p = small_problem("bf16");
  p.top_k = 1;
  p.apply_router_weight_on_input = true;
  const StandardCase c = make_case(9, p, 4, DType::kBF16);
  const StandardCase same = make_case(9, p, 4, DType::kBF16);
  for (const ActivationFormat format : kFormats) {
    for (const std::string& name : accepting(in_format(p, format, 4))) {
      ModularKernel kernel = make_kernel(c, name, format);
      run(kernel, c);
      std::string why;
      EXPECT_TRUE(test::same_bits(c.hidden_states.view(), same.hidden_states.view(), &why)) << why;
      EXPECT_TRUE(test::same_bits(c.routing.weights.view(), same.routing.weights.view(), &why));
    }
  }
}

void expect_refused(const Status& status, StatusCode code, std::string_view words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
}

TEST(ModularKernel, ConstructionRules) {
  Log log;
  const auto experts = [&](TopKWeightAndReduce r, ActivationFormat f) {
    return std::make_unique<FakeExperts>(&log, r, f);
  };
  constexpr auto kStd = ActivationFormat::kStandard;
  constexpr auto kBat = ActivationFormat::kBatched;
  const MoeProblem p = small_problem("bf16");
  const MoeProblem b = in_format(p, kBat, 4);
  ModularKernel::Options options;
  options.max_tokens = 4;
  // Formats of the halves differ, or differ from the problem's.
  expect_refused(ModularKernel::create(b, make_batched_prepare_finalize(b).value(),
                                       experts(TopKWeightAndReduce::kNoOp, kStd), options)
                     .status(),
                 StatusCode::kUnsupported, "activation format: prepare_finalize batched_reference");
  expect_refused(ModularKernel::create(b, make_local_prepare_finalize(p).value(),
                                       experts(TopKWeightAndReduce::kNoOp, kStd), options)
                     .status(),
                 StatusCode::kUnsupported, "the problem says batched");
  // Standard must be built without T, batched needs it.
  ModularKernel::Options with_t = options;
  with_t.max_tokens_per_expert = 4;
  expect_refused(ModularKernel::create(p, make_local_prepare_finalize(p).value(),
                                       experts(TopKWeightAndReduce::kNoOp, kStd), with_t)
                     .status(),
                 StatusCode::kInvalidArgument, "max_tokens_per_expert: got 4");
  expect_refused(ModularKernel::create(b, make_batched_prepare_finalize(b).value(),
                                       experts(TopKWeightAndReduce::kNaiveBatched, kBat), options)
                     .status(),
                 StatusCode::kInvalidArgument, "needs T = 4");
  // Reductions that the other half cannot finish.
  expect_refused(ModularKernel::create(b, make_batched_prepare_finalize(b).value(),
                                       experts(TopKWeightAndReduce::kNoOp, kBat), with_t)
                     .status(),
                 StatusCode::kUnsupported, "batched_reference");
  expect_refused(ModularKernel::create(p, make_local_prepare_finalize(p).value(),
                                       experts(TopKWeightAndReduce::kNaiveBatched, kStd), options)
                     .status(),
                 StatusCode::kUnsupported, "local");
  ModularKernel::Options no_tokens;
  expect_refused(ModularKernel::create(p, make_local_prepare_finalize(p).value(),
                                       experts(TopKWeightAndReduce::kNoOp, kStd), no_tokens)
                     .status(),
                 StatusCode::kInvalidArgument, "max_tokens: got 0");
  expect_refused(
      ModularKernel::create(p, nullptr, experts(TopKWeightAndReduce::kNoOp, kStd), options)
          .status(),
      StatusCode::kInvalidArgument, "null");
}

TEST(ModularKernel, TheWorkspaceMayBeTheCallers) {
  const StandardCase c = make_case(11, small_problem("bf16"), 5, DType::kBF16);
  ModularKernel::Options options;
  const ModularKernel own = make_kernel(c, "cpu_reference", ActivationFormat::kStandard, options);
  Tensor want = Tensor::zeros(DType::kF32, {5, 96}).value(),
         got = Tensor::zeros(DType::kF32, {5, 96}).value();
  ASSERT_TRUE(own.run(args_of(c, want)).ok());
  options.own_workspace = false;
  const ModularKernel kernel =
      make_kernel(c, "cpu_reference", ActivationFormat::kStandard, options);
  EXPECT_EQ(kernel.workspace_bytes(), 0);
  const std::int64_t bytes = kernel.workspace_size(5).value();
  EXPECT_EQ(bytes, own.workspace_bytes());
  EXPECT_LE(kernel.workspace_size(1).value(), bytes);
  expect_refused(kernel.workspace_size(6).status(), StatusCode::kLimitExceeded, "tokens: got 6");
  expect_refused(kernel.workspace_size(-1).status(), StatusCode::kInvalidArgument,
                 "tokens: got -1");
  Tensor workspace = Tensor::zeros(DType::kU8, {bytes + 64}).value();
  const auto size = static_cast<std::size_t>(bytes);
  ModularKernel::Args args = args_of(c, got);
  expect_refused(kernel.run(args), StatusCode::kInvalidArgument, "workspace: got none");
  args.workspace = {workspace.data(), size - 1};
  expect_refused(kernel.run(args), StatusCode::kWorkspaceTooSmall, "workspace: got");
  args.workspace = {static_cast<std::byte*>(nullptr), size};
  expect_refused(kernel.run(args), StatusCode::kInvalidArgument, "workspace: got bytes at null");
  args.workspace = {workspace.data() + 8, size};
  expect_refused(kernel.run(args), StatusCode::kInvalidLayout, "workspace: got an address");
  args.workspace = {workspace.data(), size};
  const TensorView output = args.output;
  args.output.data = workspace.data();
  expect_refused(kernel.run(args), StatusCode::kAliasing, "workspace overlaps output");
  args.output = output;
  // What is read beside the rows, and what is reported of them, lies apart from both.
  for (const auto& [field, memory] :
       {std::pair{"workspace", workspace.data()}, std::pair{"output", output.data}}) {
    const auto overlaps = [&, name = std::string(field)](const char* other, auto&& put) {
      ModularKernel::Args wrong = args;
      put(wrong);
      expect_refused(kernel.run(wrong), StatusCode::kAliasing, name + " overlaps " + other);
    };
    overlaps("expert_map", [&, at = memory](auto& a) {
      a.expert_map = {reinterpret_cast<const std::int32_t*>(at),
                      static_cast<std::size_t>(c.problem.num_experts)};
    });
    overlaps("numerics", [&, at = memory](auto& a) {
      a.numerics = {reinterpret_cast<RowNumerics*>(at), 5};
    });
    overlaps("a1_scale", [at = memory](auto& a) { a.a1_scale = {at, DType::kF32, {1}}; });
    overlaps("a2_scale", [at = memory](auto& a) { a.a2_scale = {at, DType::kF32, {1}}; });
  }
  test::poison(workspace.data(), bytes);
  ASSERT_TRUE(kernel.run(args).ok());
  EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<std::size_t>(got.bytes())), 0);
  expect_refused(kernel.enqueue({}, args), StatusCode::kUnsupported,
                 "enqueue: got a kernel on the CPU");
}

// Rows that lie apart reach to the last row's end, beyond what as many bytes in one block would:
// neither the workspace nor the output may lie between them.
TEST(ModularKernel, BuffersBetweenRowsThatLieApartAreRefused) {
  const StandardCase c = make_case(12, small_problem("bf16"), 4, DType::kBF16);
  ModularKernel::Options options;
  options.own_workspace = false;
  for (const ActivationFormat format : kFormats) {  // batched experts see copies of the rows
    const ModularKernel kernel = make_kernel(c, "cpu_reference", format, options);
    const std::int64_t h = c.problem.hidden_size, row = 2 * h;
    const std::int64_t bytes = kernel.workspace_size(4).value();
    // Four rows of one buffer, `apart` bytes apart, with room for everything else between two rows.
    const std::int64_t apart = round_up(row + std::max(bytes, 4 * 4 * h), 64) + 64;
    Tensor wide = Tensor::zeros(DType::kU8, {3 * apart + row + 64}).value();
    for (std::int64_t r = 0; r < 4; ++r) {
      std::memcpy(wide.data() + r * apart, c.hidden_states.data() + r * row,
                  static_cast<std::size_t>(row));
    }
    Tensor output = Tensor::zeros(DType::kF32, {4, h}).value();
    Tensor want = Tensor::zeros(DType::kF32, {4, h}).value();
    Tensor workspace = Tensor::zeros(DType::kU8, {bytes}).value();
    const auto size = static_cast<std::size_t>(bytes);
    ModularKernel::Args args = args_of(c, want);
    args.workspace = {workspace.data(), size};
    ASSERT_TRUE(kernel.run(args).ok());
    args.output = output.view();
    args.hidden_states.data = wide.data();
    args.hidden_states.strides[0] = apart / 2;
    ASSERT_TRUE(kernel.run(args).ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(output.view(), want.view(), &why)) << why;
    std::byte* between = wide.data() + 2 * apart + round_up(row, 64);
    args.workspace = {between, size};
    expect_refused(kernel.run(args), StatusCode::kAliasing, "workspace overlaps hidden_states");
    args.workspace = {workspace.data(), size};
    args.output.data = between;
    expect_refused(kernel.run(args), StatusCode::kAliasing, "output overlaps hidden_states");
  }
}

TEST(ModularKernel, RunRefusesWithFieldValueAndNeed) {
  const StandardCase c = make_case(10, small_problem("bf16"), 3, DType::kBF16);
  const ModularKernel kernel = make_kernel(c, "cpu_reference", ActivationFormat::kStandard);
  Tensor output = Tensor::zeros(DType::kF32, {3, 96}).value();
  const auto refuse = [&](const std::function<void(ModularKernel::Args&)>& spoil, StatusCode code,
                          std::string_view words) {
    ModularKernel::Args args = args_of(c, output);
    spoil(args);
    expect_refused(kernel.run(args), code, words);
  };
  refuse(
      [](auto& a) {
        a.hidden_states = ConstTensorView(a.hidden_states.data, DType::kBF16, {4, 96});
      },
      StatusCode::kLimitExceeded, "tokens: got 4, need at most max_tokens = 3");
  refuse(
      [](auto& a) {
        a.hidden_states = ConstTensorView(a.hidden_states.data, DType::kBF16, {3, 48});
      },
      StatusCode::kInvalidShape, "hidden_states: got [3, 48], need [M, 96]");
  refuse(
      [](auto& a) { a.hidden_states = ConstTensorView(a.hidden_states.data, DType::kBF16, {288}); },
      StatusCode::kInvalidShape, "hidden_states");
  refuse([](auto& a) { a.hidden_states.dtype = DType::kI8; }, StatusCode::kInvalidDType,
         "hidden_states: got I8");
  refuse(
      [](auto& a) {
        a.output = TensorView(a.output.data, DType::kF32, {2, 96});
      },
      StatusCode::kInvalidShape, "output: got [2, 96], need [3, 96]");
  refuse(
      [](auto& a) {
        a.topk_ids = ConstTensorView(a.topk_ids.data, DType::kI32, {2, 3});
      },
      StatusCode::kInvalidShape, "topk_ids: got [2, 3], need [3, 2]");
  refuse([](auto& a) { a.topk_weights.dtype = DType::kBF16; }, StatusCode::kInvalidDType,
         "topk_weights");
  static const std::vector<std::int32_t> map = {0, 1};
  refuse([](auto& a) { a.expert_map = map; }, StatusCode::kInvalidShape, "expert_map: got [2]");
  static const std::vector<std::int32_t> ids = {0, 1, 2, 3, 4, 99};
  refuse([](auto& a) { a.topk_ids.data = reinterpret_cast<const std::byte*>(ids.data()); },
         StatusCode::kInvalidArgument, "99");
}

TEST(ModularKernel, CallsFromSeveralThreadsGiveTheSameBits) {
  const StandardCase c = make_case(11, small_problem("bf16"), 6, DType::kBF16);
  const ModularKernel kernel = make_kernel(c, "cpu_reference", ActivationFormat::kStandard);
  std::vector<Tensor> outputs;
  for (int i = 0; i < 4; ++i) {
    outputs.push_back(Tensor::zeros(DType::kF32, c.hidden_states.shape()).value());
  }
  std::vector<std::thread> threads;
  for (Tensor& output : outputs) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(kernel.run(args_of(c, output)).ok());
    });
  }
  for (std::thread& t : threads) t.join();
  std::string why;
  for (const Tensor& output : outputs) {
    EXPECT_TRUE(test::same_bits(output.view(), outputs[0].view(), &why)) << why;
  }
}

}  // namespace
}  // namespace moesaic
