// Static activation scales of the CPU backends: each expert's own, one for all, or a call's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/team.h"
#include "moesaic/modular_kernel.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic::test {
namespace {

const cpu::ScopedTeams always_teams;  // small problems on several threads

constexpr const char* kStaticSchemes[] = {"fp8-static", "mxfp4-static", "int4-fp8-static", "nvfp4"};

// Every backend that this machine has for the problem, the plain reference among them.
std::vector<std::string> backends(const MoeProblem& problem) {
  std::vector<std::string> names;
  for (const CandidateReport& row : explain_experts(problem)) {
    if (row.accepted) names.push_back(row.name);
  }
  EXPECT_GE(names.size(), 2U);
  return names;
}

StandardCase static_case(std::uint64_t seed, const char* quant, std::int64_t tokens) {
  MoeProblem p = small_problem(quant);
  p.num_threads = 2;
  return make_case(seed, p, tokens, DType::kBF16, 0.1);
}

void set_all(Tensor& scales, float value) {
  std::fill_n(scales.as<float>(), scales.bytes() / 4, value);
}

struct CallScales {
  ConstTensorView a1 = {}, a2 = {};
};

// Standard format, or with one slab of rows per expert where the problem is batched.
Result<Tensor> run(const Experts& experts, const StandardCase& c, const CallScales& scales) {
  const MoeProblem& p = c.problem;
  const bool batched = p.format == ActivationFormat::kBatched;
  const Shape shape =
      batched ? Shape{p.num_local_experts, p.max_tokens, p.hidden_size} : c.hidden_states.shape();
  Tensor slabs = Tensor::zeros(DType::kBF16, shape).value();
  const std::vector<std::int32_t> counts(static_cast<std::size_t>(p.num_local_experts),
                                         static_cast<std::int32_t>(p.max_tokens));
  for (std::int64_t e = 0; batched && e < p.num_local_experts; ++e) {
    std::memcpy(slabs.data() + e * c.hidden_states.bytes(), c.hidden_states.data(),
                static_cast<std::size_t>(c.hidden_states.bytes()));
  }
  Tensor output = Tensor::uninitialized(DType::kF32, shape).value();
  poison(output.view());
  Tensor workspace = poisoned_bytes(experts.workspace_size(c.hidden_states.shape()[0]).value());
  ExpertsArgs args;
  args.hidden_states = batched ? slabs.view() : c.hidden_states.view();
  if (!batched) args.topk_ids = c.routing.ids.view();
  if (!batched) args.topk_weights = c.routing.weights.view();
  if (batched) args.expert_num_tokens = counts;
  args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
  args.output = output.view();
  args.a1_scale = scales.a1;
  args.a2_scale = scales.a2;
  MOESAIC_RETURN_IF_ERROR(experts.run(args));
  return output;
}

void expect_same(const Tensor& got, const Tensor& want) {
  std::string why;
  EXPECT_TRUE(same_bits(got.view(), want.view(), &why)) << why;
}

// Where all experts have the same scale a row is quantised once for all of them. An expert that
// nobody asks for and that has another scale makes it once per slot: the bits stay.
TEST(StaticScales, EqualScalesTakeOneRowForAllWithTheSameBits) {
  for (const char* quant : kStaticSchemes) {
    StandardCase c = static_case(81, quant, 90);  // enough rows of an expert for every kernel
    std::int32_t* const ids = c.routing.ids.as<std::int32_t>();
    for (std::int64_t i = 0; i < c.routing.ids.bytes() / 4; ++i) {
      if (ids[i] == 5) ids[i] = -1;
    }
    set_all(c.weights.w13_input_scale, quant[0] == 'n' ? 0x1p-9F : 0x1p-6F);
    for (const std::string& name : backends(c.problem)) {
      SCOPED_TRACE(name + " " + quant);
      const Tensor once = run_standard(*make_backend(name, c), c);
      c.weights.w13_input_scale.as<float>()[5] *= 3;
      const Tensor per_slot = run_standard(*make_backend(name, c), c);
      c.weights.w13_input_scale.as<float>()[5] /= 3;
      expect_same(per_slot, once);
    }
  }
}

// A call's scales are those that the experts could have been made with.
TEST(StaticScales, ScalesOfACallHaveTheBitsOfExpertsMadeWithThem) {
  for (const char* quant : kStaticSchemes) {
    for (const bool batched : {false, true}) {
      StandardCase c = static_case(82, quant, 9);
      c.problem.max_tokens = 9;
      if (batched) c.problem.format = ActivationFormat::kBatched;
      OwnedExpertWeights& w = c.weights;
      Tensor a1 = Tensor::zeros(DType::kF32, {6}).value();
      Tensor a2 = Tensor::zeros(DType::kF32, {6}).value();
      for (std::int64_t e = 0; e < 6; ++e) {
        a1.as<float>()[e] =
            w.w13_input_scale.as<float>()[e] * (1.5F - 0.1F * static_cast<float>(e));
        a2.as<float>()[e] = w.w2_input_scale.as<float>()[e] * 1.3F;
      }
      for (const std::string& name : backends(c.problem)) {
        SCOPED_TRACE(name + " " + quant + (batched ? " batched" : ""));
        const auto stored = make_backend(name, c);
        const Tensor as_stored = run(*stored, c, {}).value();
        const Tensor each = run(*stored, c, {a1.view(), a2.view()}).value();
        const Tensor first = run(*stored, c, {a1.view(), {}}).value();
        Tensor all = Tensor::zeros(DType::kF32, {1}).value();
        *all.as<float>() = *a1.as<float>();
        const Tensor same = run(*stored, c, {all.view(), all.view()}).value();
        std::string why;
        EXPECT_FALSE(same_bits(each.view(), as_stored.view(), &why));
        EXPECT_FALSE(same_bits(first.view(), each.view(), &why));

        StandardCase given = static_case(82, quant, 9);
        given.problem = c.problem;
        std::memcpy(given.weights.w13_input_scale.data(), a1.data(), 24);
        expect_same(first, run(*make_backend(name, given), given, {}).value());
        std::memcpy(given.weights.w2_input_scale.data(), a2.data(), 24);
        expect_same(each, run(*make_backend(name, given), given, {}).value());
        set_all(given.weights.w13_input_scale, *all.as<float>());
        set_all(given.weights.w2_input_scale, *all.as<float>());
        expect_same(same, run(*make_backend(name, given), given, {}).value());
        expect_same(run(*stored, c, {}).value(), as_stored);  // and nothing stays behind
      }
    }
  }
}

TEST(StaticScales, RefusesWhatIsNoScaleOfACall) {
  const StandardCase c = static_case(83, "fp8-static", 3);
  Tensor bad = Tensor::zeros(DType::kF32, {6}).value();
  set_all(bad, 0.01F);
  const Tensor two = Tensor::zeros(DType::kF32, {2}).value();
  const Tensor narrow = Tensor::zeros(DType::kBF16, {6}).value();
  const Tensor column = Tensor::zeros(DType::kF32, {6, 1}).value();
  for (const std::string& name : backends(c.problem)) {
    SCOPED_TRACE(name);
    const auto experts = make_backend(name, c);
    const auto refused = [&](const CallScales& scales, StatusCode code,
                             std::initializer_list<const char*> words) {
      expect_refusal(run(*experts, c, scales).status(), code, words);
    };
    refused({two.view(), {}}, StatusCode::kInvalidShape, {"a1_scale", "[2]", "[1] or [6]"});
    refused({{}, column.view()}, StatusCode::kInvalidShape, {"a2_scale", "[6, 1]"});
    refused({{}, narrow.view()}, StatusCode::kInvalidDType, {"a2_scale", "BF16", "F32"});
    for (const float v : {0.0F, -1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
      bad.as<float>()[4] = v;
      refused({bad.view(), {}}, StatusCode::kInvalidArgument, {"a1_scale", "at [4]", "above 0"});
      refused({{}, bad.view()}, StatusCode::kInvalidArgument, {"a2_scale", "at [4]"});
    }
  }
  for (const char* quant : {"bf16", "fp8-block", "fp8-channel", "nvfp4-bf16", "int8"}) {
    SCOPED_TRACE(quant);
    const StandardCase other = static_case(84, quant, 3);
    Tensor one = Tensor::zeros(DType::kF32, {1}).value();
    set_all(one, 1.0F);
    for (const std::string& name : backends(other.problem)) {
      expect_refusal(run(*make_backend(name, other), other, {{}, one.view()}).status(),
                     StatusCode::kUnsupported, {"a2_scale", "no static activation scales"});
    }
  }
}

TEST(StaticScales, TheModularKernelPassesThemOn) {
  const StandardCase c = static_case(85, "nvfp4", 5);
  const std::string name = backends(c.problem).front();
  auto kernel = ModularKernel::create(c.problem, make_local_prepare_finalize(c.problem).value(),
                                      make_backend(name, c), {.max_tokens = 5})
                    .value();
  Tensor a1 = Tensor::zeros(DType::kF32, {1}).value();
  set_all(a1, 0x1p-8F);
  Tensor output = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
  ModularKernel::Args args{.hidden_states = c.hidden_states.view(),
                           .topk_weights = c.routing.weights.view(),
                           .topk_ids = c.routing.ids.view(),
                           .expert_map = {},
                           .output = output.view()};
  args.a1_scale = a1.view();
  const Status status = kernel.run(args);
  ASSERT_TRUE(status.ok()) << status.to_string();
  expect_same(output, run(*make_backend(name, c), c, {a1.view(), {}}).value());
  set_all(a1, 0.0F);
  expect_refusal(kernel.run(args), StatusCode::kInvalidArgument, {"a1_scale"});
}

}  // namespace
}  // namespace moesaic::test
