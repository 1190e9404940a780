// The catalogue on both kinds of device, as far as it needs none: who takes what, and what the row
// of the GPU says of a call's arguments.
#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "experts/sm90/catalogue_row.h"
#include "support/experts_run.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::small_problem;

constexpr Device kGpu = Device::cuda(0);

MoeProblem on_gpu(const char* quant) {
  MoeProblem p = small_problem(quant);
  p.device = kGpu;
  return p;
}

TEST(OneInterface, EveryRowKnowsItsDevice) {
  for (const CandidateReport& row : explain_experts(small_problem("bf16"))) {
    if (row.name != "cuda_sm90") continue;
    EXPECT_FALSE(row.accepted);
    EXPECT_EQ(row.reason, "device: cpu, need a Hopper GPU");
  }
  int refused = 0;
  for (const CandidateReport& row : explain_experts(on_gpu("bf16"))) {
    const bool of_gpus = row.name == "cuda_sm90" || row.name == "cuda_general";
    EXPECT_EQ(row.accepted, of_gpus) << row.name << ": " << row.reason;
    if (row.name == "cpu_reference") {
      EXPECT_EQ(row.reason, "device: cuda:0, need cpu");
    }
    refused += row.accepted ? 0 : 1;
  }
  EXPECT_GE(refused, 2);
  EXPECT_EQ(choose_experts(on_gpu("fp8-block")).value()->name, "cuda_sm90");
  expect_refusal(choose_experts(on_gpu("bf16"), "cpu_reference").status(), StatusCode::kUnsupported,
                 {"cpu_reference: device: cuda:0, need cpu"});
  EXPECT_EQ(choose_experts(on_gpu("nvfp4")).value()->name, "cuda_sm90");
  expect_refusal(choose_experts(on_gpu("mxfp4-token"), "cuda_sm90").status(),
                 StatusCode::kUnsupported,
                 {"cuda_sm90: activation of mxfp4-fp8: got F8_E4M3, one scale per token"});
}

// What the fast kernel passes over goes to the general one, which has the last row of GPUs.
TEST(OneInterface, TheGeneralRowOfGpusTakesEverySize) {
  const auto chosen = [](const MoeProblem& p) { return choose_experts(p).value()->name; };
  MoeProblem odd = on_gpu("bf16");
  odd.hidden_size = 97;
  EXPECT_EQ(chosen(odd), "cuda_general");
  std::string before;
  for (const CandidateReport& row : explain_experts(odd)) {
    if (row.name == "cuda_sm90") {
      EXPECT_EQ(row.reason, "hidden_size: got 97, need a multiple of 8");
    }
    if (row.name == "cuda_general") {
      EXPECT_EQ(before, "cuda_sm90");
      EXPECT_TRUE(row.accepted);
    }
    before = row.name;
  }
  for (const char* quant : {"f32", "mxfp4-token", "mxfp4-f32-groups", "int4-fp8-g32",
                            "fp8-block-64x64", "int4-g128-int8", "gptq-int8"}) {
    EXPECT_EQ(chosen(on_gpu(quant)), "cuda_general") << quant;
  }
  // Rows of other dtypes than bf16.
  MoeProblem halves = on_gpu("nvfp4");
  EXPECT_EQ(chosen(halves), "cuda_sm90");
  halves.activation_dtype = DType::kF16;
  EXPECT_EQ(chosen(halves), "cuda_general");
  for (const char* quant : {"int4-g128", "awq", "gptq", "nf4-bf16", "int8-bf16", "q6k", "fp8-bf16",
                            "q3k", "q4k", "q5k", "f16"}) {
    EXPECT_EQ(chosen(on_gpu(quant)), "cuda_sm90") << quant;
  }
  MoeProblem weighted = on_gpu("bf16");
  weighted.apply_router_weight_on_input = true;
  EXPECT_EQ(chosen(weighted), "cuda_general") << "several experts, weights on the input";
  MoeProblem batched = on_gpu("bf16");
  batched.format = ActivationFormat::kBatched;
  EXPECT_EQ(chosen(batched), "cuda_sm90");
  batched.hidden_size = 9;
  EXPECT_EQ(chosen(batched), "cuda_general");
  for (const char* quant : {"int4-g128-int8", "f16"}) {
    batched = on_gpu(quant);
    batched.format = ActivationFormat::kBatched;
    EXPECT_EQ(chosen(batched), "cuda_general") << quant;
  }
  // Sizes that no grid has.
  MoeProblem wide = on_gpu("bf16");
  wide.hidden_size = 65535 * 64 + 1;
  expect_refusal(choose_experts(wide).status(), StatusCode::kUnsupported,
                 {"cuda_general: hidden_size: got 4194241, need at most 4194240"});
}

TEST(OneInterface, EveryRowKeepsOneContract) {
  for (const ExpertsBackend& row : experts_catalogue()) {
    const bool of_gpus = row.name == "cuda_sm90" || row.name == "cuda_general";
    MoeProblem problem = of_gpus ? on_gpu("bf16") : small_problem("bf16");
    problem.max_tokens = 64;
    if (!row.can_implement(problem).ok()) continue;  // a tier that this machine lacks
    std::int64_t before = 0;
    for (const std::int64_t tokens : {0, 1, 7, 64}) {
      const std::int64_t bytes = row.workspace_size(problem, tokens).value();
      EXPECT_GE(bytes, before) << row.name << ' ' << tokens;
      before = bytes;
    }
    EXPECT_FALSE(row.determinism.empty());
    EXPECT_GE(row.threads(problem, 64), 1);
    problem.quant.weight.dtype = DType::kI64;
    EXPECT_FALSE(row.workspace_size(problem, 1).ok()) << row.name;
  }
}

TEST(OneInterface, AMissingDeviceIsARefusal) {
  MoeProblem problem = small_problem("bf16");
  problem.device = Device::cuda(99);
  const test::StandardCase c = test::make_case(1, small_problem("bf16"), 2, DType::kBF16);
  const auto source = make_stacked_source(c.weights.view());
  const auto made = choose_experts(problem).value()->create(problem, *source);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().to_string(), check_device(problem.device).to_string());
}

// Host memory under views that say otherwise: nothing here looks at it.
struct GpuCall {
  test::StandardCase c = test::make_case(2, small_problem("bf16"), 5, DType::kBF16);
  Tensor output = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
  ExpertsArgs args;
  explicit GpuCall(Device device) {
    c.problem.device = device;
    const auto put = [&](auto view) {
      view.device = device;
      return view;
    };
    args.hidden_states = put(c.hidden_states.view());
    args.topk_ids = put(c.routing.ids.view());
    args.topk_weights = put(c.routing.weights.view());
    args.output = put(output.view());
  }
};

TEST(OneInterface, TheGpuSaysWhatItNeedsOfACall) {
  const GpuCall good(kGpu);
  EXPECT_TRUE(cuda::check_sm90_args(good.c.problem, good.args).ok())
      << cuda::check_sm90_args(good.c.problem, good.args).to_string();
  const auto refuse = [](const std::function<void(GpuCall&)>& change, StatusCode code,
                         std::initializer_list<const char*> words) {
    GpuCall call(kGpu);
    change(call);
    expect_refusal(cuda::check_sm90_args(call.c.problem, call.args), code, words);
  };
  refuse([](GpuCall& c) { c.args.hidden_states.device = Device::cpu(); },
         StatusCode::kInvalidArgument, {"hidden_states: got memory of cpu, need memory of cuda:0"});
  refuse([](GpuCall& c) { c.args.topk_ids.device = Device::cuda(1); }, StatusCode::kInvalidArgument,
         {"topk_ids: got memory of cuda:1"});
  refuse([](GpuCall& c) { c.args.topk_weights.device = Device::cpu(); },
         StatusCode::kInvalidArgument, {"topk_weights"});
  refuse([](GpuCall& c) { c.args.output.device = Device::cpu(); }, StatusCode::kInvalidArgument,
         {"output"});
  refuse([](GpuCall& c) { c.args.hidden_states.dtype = DType::kF16; }, StatusCode::kInvalidDType,
         {"hidden_states: got F16, need BF16"});
  refuse([](GpuCall& c) { c.args.output.dtype = DType::kF16; }, StatusCode::kInvalidDType,
         {"output: got F16"});
  refuse(
      [](GpuCall& c) {
        c.args.topk_ids.shape = Shape{5, 3};
      },
      StatusCode::kInvalidShape, {"topk_ids: got [5, 3], need [5, 2]"});
  refuse(
      [](GpuCall& c) {
        c.args.output.shape = Shape{4, 96};
      },
      StatusCode::kInvalidShape, {"output"});
  // Rows may lie apart, but not over each other.
  refuse([](GpuCall& c) { c.args.hidden_states.strides[0] /= 2; }, StatusCode::kInvalidLayout,
         {"hidden_states"});
  refuse([](GpuCall& c) { c.args.output.data = c.c.hidden_states.data() + 2; },
         StatusCode::kAliasing, {"output", "hidden_states"});
  refuse([](GpuCall& c) { c.args.hidden_scale = c.args.topk_weights; }, StatusCode::kUnsupported,
         {"hidden_scale", "bf16"});
  // The general experts take rows and output of every float dtype.
  GpuCall half(kGpu);
  half.args.output.dtype = DType::kF16;
  EXPECT_TRUE(cuda::check_sm90_args(half.c.problem, half.args, /*any_rows=*/true).ok());
  half.args.output.dtype = DType::kI32;
  expect_refusal(cuda::check_sm90_args(half.c.problem, half.args, true), StatusCode::kInvalidDType,
                 {"output: got I32"});
  static std::int32_t map[3] = {};
  refuse([](GpuCall& c) { c.args.expert_map = map; }, StatusCode::kInvalidShape,
         {"expert_map: got [3], need [6]"});
  static RowNumerics rows[2];
  refuse([](GpuCall& c) { c.args.numerics = rows; }, StatusCode::kInvalidShape,
         {"numerics: got [2], need [5]"});
}

// Rows that were quantised elsewhere: codes, and scales whose groups lie apart.
TEST(OneInterface, TheGpuTakesCodesAsTransportsHandThemOver) {
  const MoeProblem problem = [] {
    MoeProblem p = small_problem("fp8-block");
    p.device = kGpu;
    p.max_tokens = 5;
    return p;
  }();
  const std::int64_t groups = problem.hidden_size / 128;
  test::StandardCase c = test::make_case(2, small_problem("fp8-block"), 5, DType::kBF16);
  Tensor codes = Tensor::zeros(DType::kF8E4M3, {5, problem.hidden_size}).value();
  Tensor scales = Tensor::zeros(DType::kF32, {groups, 8}).value();
  Tensor output = Tensor::zeros(DType::kF32, {5, problem.hidden_size}).value();
  ExpertsArgs args;
  args.hidden_states = {codes.data(), DType::kF8E4M3, codes.shape(), kGpu};
  args.hidden_scale = {scales.data(), DType::kF32, Shape{5, groups}, kGpu};
  args.hidden_scale.strides = {1, 8};
  args.topk_ids = {c.routing.ids.data(), DType::kI32, c.routing.ids.shape(), kGpu};
  args.topk_weights = {c.routing.weights.data(), DType::kF32, c.routing.weights.shape(), kGpu};
  args.output = {output.data(), DType::kF32, output.shape(), kGpu};
  EXPECT_TRUE(cuda::check_sm90_args(problem, args).ok())
      << cuda::check_sm90_args(problem, args).to_string();
  ExpertsArgs bad = args;
  bad.hidden_scale.strides = {groups, 1};
  expect_refusal(cuda::check_sm90_args(problem, bad), StatusCode::kInvalidLayout,
                 {"hidden_scale: got strides [2, 1], need [1, 5 or more]"});
  bad = args;
  bad.hidden_scale.device = Device::cpu();
  expect_refusal(cuda::check_sm90_args(problem, bad), StatusCode::kInvalidArgument,
                 {"hidden_scale: got memory of cpu"});
  bad = args;
  bad.hidden_states.dtype = DType::kBF16;
  expect_refusal(cuda::check_sm90_args(problem, bad), StatusCode::kInvalidDType,
                 {"hidden_states: got BF16, need F8_E4M3"});
  static RowNumerics rows[5];
  bad = args;
  bad.numerics = rows;
  expect_refusal(cuda::check_sm90_args(problem, bad), StatusCode::kUnsupported, {"numerics"});
}

TEST(OneInterface, TheCpuRefusesMemoryOfAGpu) {
  for (const ExpertsBackend& row : experts_catalogue()) {
    if (!row.can_implement(small_problem("bf16")).ok()) continue;
    GpuCall call(Device::cpu());
    const auto experts = test::make_backend(row.name, call.c);
    const Tensor workspace =
        test::poisoned_bytes(row.workspace_size(call.c.problem, call.c.problem.max_tokens).value());
    call.args.workspace = {const_cast<std::byte*>(workspace.data()),
                           static_cast<std::size_t>(workspace.bytes())};
    EXPECT_TRUE(experts->run(call.args).ok()) << row.name;
    call.args.topk_ids.device = kGpu;
    expect_refusal(experts->run(call.args), StatusCode::kInvalidArgument,
                   {"topk_ids: got memory of cuda:0, need memory of cpu"});
  }
}

// A token's rows, added one by one, are what run makes of them.
TEST(OneInterface, AccumulateAddsAsRunDoes) {
  for (const ExpertsBackend& row : experts_catalogue()) {
    if (!row.can_implement(small_problem("bf16")).ok()) continue;
    const test::StandardCase both = test::make_case(3, small_problem("bf16"), 4, DType::kBF16);
    const Tensor want = test::run_standard(*test::make_backend(row.name, both), both);
    const std::int64_t hidden = both.problem.hidden_size, k = both.problem.top_k;
    Tensor sum = Tensor::zeros(DType::kF32, want.shape()).value();
    for (std::int64_t slot = 0; slot < k; ++slot) {
      test::StandardCase one = test::make_case(3, small_problem("bf16"), 4, DType::kBF16);
      one.problem.top_k = 1;
      one.routing.ids = Tensor::zeros(DType::kI32, {4, 1}).value();
      one.routing.weights = Tensor::zeros(DType::kF32, {4, 1}).value();
      for (std::int64_t t = 0; t < 4; ++t) {
        one.routing.ids.as<std::int32_t>()[t] = both.routing.ids.as<std::int32_t>()[t * k + slot];
        one.routing.weights.as<float>()[t] = 1.0F;
      }
      const auto experts = test::make_backend(row.name, one);
      const Tensor rows = test::run_standard(*experts, one);
      for (std::int64_t t = 0; t < 4; ++t) {
        experts->accumulate(rows.as<float>() + t * hidden,
                            both.routing.weights.as<float>()[t * k + slot], hidden,
                            sum.as<float>() + t * hidden);
      }
    }
    for (std::int64_t i = 0; i < 4 * hidden; ++i) {
      ASSERT_EQ(sum.as<float>()[i], want.as<float>()[i]) << row.name << " at " << i;
    }
  }
}

TEST(OneInterface, EnqueueIsForMemoryOfAGpu) {
  const test::StandardCase c = test::make_case(6, small_problem("bf16"), 2, DType::kBF16);
  ExpertsArgs args;
  args.hidden_states = c.hidden_states.view();
  expect_refusal(test::make_backend("cpu_reference", c)->enqueue({}, args),
                 StatusCode::kUnsupported, {"enqueue: got memory of cpu for cpu_reference"});
}

}  // namespace
}  // namespace moesaic
