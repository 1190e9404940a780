// Misuse: every documented error of the shared checks, by code and by the key words of its text.
#include "experts/problem_checks.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "support/experts_run.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::make_case;
using test::small_problem;
using test::StandardCase;

void expect_refused(const Status& status, StatusCode code, std::string_view words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(words), std::string::npos)
      << "text: " << status.message() << "\nwant: " << words;
}

struct BadProblem {
  const char* quant;
  std::function<void(MoeProblem&)> spoil;
  StatusCode code;
  const char* words;
};

TEST(CheckProblem, RefusesWithFieldValueAndNeed) {
  const std::vector<BadProblem> cases = {
      {"bf16", [](auto& p) { p.num_experts = 0; }, StatusCode::kInvalidArgument,
       "num_experts: got 0, need 1"},
      {"bf16", [](auto& p) { p.num_experts = -6; }, StatusCode::kInvalidArgument, "got -6"},
      {"bf16", [](auto& p) { p.num_local_experts = 7; }, StatusCode::kInvalidArgument,
       "num_local_experts: got 7, need 0 .. 6"},
      {"bf16", [](auto& p) { p.top_k = 0; }, StatusCode::kInvalidArgument, "top_k: got 0"},
      {"bf16", [](auto& p) { p.top_k = 7; }, StatusCode::kInvalidArgument, "need 1 .. 6"},
      {"bf16", [](auto& p) { p.hidden_size = 0; }, StatusCode::kInvalidArgument, "hidden_size"},
      {"bf16", [](auto& p) { p.intermediate_size = -1; }, StatusCode::kInvalidArgument,
       "intermediate_size: got -1"},
      {"bf16", [](auto& p) { p.max_tokens = -1; }, StatusCode::kInvalidArgument, "max_tokens"},
      {"bf16", [](auto& p) { p.num_threads = -2; }, StatusCode::kInvalidArgument, "num_threads"},
      {"bf16", [](auto& p) { p.num_threads = 4097; }, StatusCode::kInvalidArgument,
       "num_threads: got 4097, need 0 (automatic) .. 4096"},
      // 4-bit forms of matrices that are stored as bytes.
      {"q4k-q6k", [](auto& p) { p.hidden_size = 251; }, StatusCode::kUnsupported,
       "hidden_size: got 251"},
      {"q3k-q4k", [](auto& p) { p.intermediate_size = 413; }, StatusCode::kUnsupported,
       "intermediate_size: got 413"},
      {"bf16",
       [](auto& p) {
         p.hidden_size = std::numeric_limits<std::int32_t>::max();
         p.intermediate_size = std::numeric_limits<std::int32_t>::max() / 2;
       },
       StatusCode::kLimitExceeded, "2^58"},
      {"bf16", [](auto& p) { p.activation.limit = 0; }, StatusCode::kInvalidArgument, "limit"},
      {"bf16", [](auto& p) { p.quant.weight.dtype = DType::kI8; }, StatusCode::kUnsupported,
       "quant.weight: got I8"},
      {"bf16", [](auto& p) { p.quant.weight.dtype = DType::kF16; }, StatusCode::kUnsupported,
       "F16 weights with BF16 activations"},
      {"fp8-block", [](auto& p) { p.quant.weight.block_n = 0; }, StatusCode::kUnsupported, "0x128"},
      {"fp8-block", [](auto& p) { p.quant.weight.block_k = 64; }, StatusCode::kUnsupported,
       "got groups of 128 columns with weights in blocks of 128x64"},
      {"fp8-block", [](auto& p) { p.quant.weight.block_n = 64; }, StatusCode::kInvalidArgument,
       "got fp8-block, these operands mean fp8-any-block"},
      {"fp8-block", [](auto& p) { p.quant.activation.dynamic = false; }, StatusCode::kUnsupported,
       "F8_E4M3 weights with F8_E4M3"},
      // An operand that was changed after the scheme was made.
      {"bf16", [](auto& p) { p.quant.activation.dtype = DType::kF32; },
       StatusCode::kInvalidArgument, "quant.kind: got bf16, these operands mean f32"},
      {"bf16", [](auto& p) { p.activation_dtype = DType::kF16; }, StatusCode::kUnsupported,
       "activation_dtype: got F16, scheme bf16 needs BF16"},
      // Outside their enumerations.
      {"bf16", [](auto& p) { p.quant.kind = static_cast<ComputeScheme>(200); },
       StatusCode::kInvalidArgument, "quant.kind: got unknown, these operands mean bf16"},
      {"bf16", [](auto& p) { p.quant.weight.dtype = static_cast<DType>(36); },
       StatusCode::kUnsupported, "quant.weight: got unknown"},
      {"bf16", [](auto& p) { p.activation_dtype = static_cast<DType>(99); },
       StatusCode::kUnsupported, "activation_dtype: got unknown"},
      {"bf16", [](auto& p) { p.activation.kind = static_cast<ActivationKind>(99); },
       StatusCode::kInvalidArgument, "kind: got 99"},
      {"bf16", [](auto& p) { p.format = static_cast<ActivationFormat>(7); },
       StatusCode::kInvalidArgument, "format: got 7"},
      {"f16", [](auto& p) { p.activation_dtype = DType::kBF16; }, StatusCode::kUnsupported,
       "scheme f16 needs F16"},
      {"fp8-bf16", [](auto& p) { p.activation_dtype = DType::kF32; }, StatusCode::kUnsupported,
       "scheme fp8-bf16 needs BF16"},
      {"f32", [](auto& p) { p.activation_dtype = DType::kI32; }, StatusCode::kUnsupported,
       "activation_dtype: got I32"},
      {"mxfp4-bf16", [](auto& p) { p.intermediate_size = 48; }, StatusCode::kUnsupported,
       "multiple of 32"},
      {"mxfp4-bf16", [](auto& p) { p.quant.weight.block_k = 16; }, StatusCode::kUnsupported,
       "per 1x32"},
      {"mxfp8", [](auto& p) { p.hidden_size = 200; }, StatusCode::kUnsupported,
       "hidden_size: got 200"},
  };
  for (const BadProblem& bad : cases) {
    MoeProblem problem = small_problem(bad.quant);
    ASSERT_TRUE(check_problem(problem).ok());
    bad.spoil(problem);
    expect_refused(check_problem(problem), bad.code, bad.words);
    EXPECT_FALSE(choose_experts(problem).ok());
  }
}

// The last block of a row or of gate's and up's rows may be a part of one, and so may be the last
// group of activations; those of MX formats may not.
TEST(CheckProblem, BlocksOfFp8MayEndRagged) {
  for (const char* quant : {"fp8-bf16", "fp8-block"}) {
    MoeProblem problem = small_problem(quant);
    problem.hidden_size = 200;
    problem.intermediate_size = 72;
    EXPECT_TRUE(check_problem(problem).ok()) << check_problem(problem).to_string();
  }
  MoeProblem groups = small_problem("mxfp4-fp8");
  groups.hidden_size = 2880;  // 22.5 groups of 128 activations
  EXPECT_TRUE(check_problem(groups).ok()) << check_problem(groups).to_string();
}

TEST(ComputeScheme, ComesFromTheOperandsNotTheName) {
  const auto scheme = [](const char* weight, const char* activation) {
    return make_scheme("by hand", quant_scheme_from_name(weight).value().weight,
                       quant_scheme_from_name(activation).value().activation, 0)
        .kind;
  };
  EXPECT_EQ(scheme("bf16", "f32"), ComputeScheme::kF32);
  EXPECT_EQ(scheme("fp8-block", "f32"), ComputeScheme::kF32);
  EXPECT_EQ(scheme("bf16", "bf16"), ComputeScheme::kBF16);
  EXPECT_EQ(scheme("f16", "f16"), ComputeScheme::kF16);
  EXPECT_EQ(scheme("fp8-block", "bf16"), ComputeScheme::kFp8Bf16);
  EXPECT_EQ(scheme("fp8-block", "fp8-block"), ComputeScheme::kFp8Block);
  EXPECT_EQ(scheme("mxfp4-bf16", "mxfp4-bf16"), ComputeScheme::kMxfp4Bf16);
  EXPECT_EQ(scheme("mxfp4-bf16", "f32"), ComputeScheme::kF32);
  EXPECT_EQ(scheme("fp8-tensor", "fp8-channel"), ComputeScheme::kFp8Scaled);
  EXPECT_EQ(scheme("mxfp4", "mxfp4-fp8"), ComputeScheme::kMxfp4Fp8);
  EXPECT_EQ(scheme("mxfp4", "mxfp4"), ComputeScheme::kMxfp4);
  EXPECT_EQ(scheme("int8", "bf16"), ComputeScheme::kWeightOnly);
  for (const char* name : {"mxfp8", "nvfp4", "int4-fp8", "int8"})
    EXPECT_EQ(compute_scheme_name(scheme(name, name)), name);
  for (const char* name : {"int4-g128", "nvfp4", "nf4-bf16", "int4-fp8", "mxfp8", "fp8-tensor"}) {
    EXPECT_EQ(scheme(name, "bf16"), ComputeScheme::kWeightOnly) << name;
    EXPECT_EQ(scheme(name, "f32"), ComputeScheme::kF32) << name;
    EXPECT_EQ(scheme(name, "f16"), ComputeScheme::kNone) << name;
  }
  EXPECT_EQ(scheme("nvfp4", "mxfp4"), ComputeScheme::kNone);
  EXPECT_EQ(scheme("int4-g128", "int8"), ComputeScheme::kNone);
  EXPECT_EQ(scheme("bf16", "fp8-block"), ComputeScheme::kNone);
  EXPECT_EQ(scheme("fp8-block", "f16"), ComputeScheme::kNone);
}

struct BadWeights {
  const char* quant;
  std::function<void(MoeProblem&, StackedExpertWeights&, StandardCase&)> spoil;
  StatusCode code;
  const char* words;
};

void set_shape(ConstTensorView& t, std::initializer_list<std::int64_t> dims) {
  t = ConstTensorView(t.data, t.dtype, Shape(dims));
}

TEST(CheckExpertWeights, RefusesWithTheExpertAndTheTensor) {
  const std::vector<BadWeights> cases = {
      {"bf16",
       [](auto&, auto& w, auto&) {
         set_shape(w.w13, {6, 96, 128});
       },
       StatusCode::kInvalidShape, "expert 0: w13: got [96, 128], need [128, 96]"},
      {"bf16",
       [](auto&, auto& w, auto&) {
         set_shape(w.w2, {6, 96, 63});
       },
       StatusCode::kInvalidShape, "w2: got [96, 63], need [96, 64]"},
      {"bf16", [](auto&, auto& w, auto&) { w.w2.dtype = DType::kF16; }, StatusCode::kInvalidDType,
       "w2: got F16, need BF16"},
      {"f32", [](auto&, auto& w, auto&) { w.w13.dtype = DType::kI32; }, StatusCode::kInvalidDType,
       "w13: got I32"},
      {"bf16", [](auto&, auto& w, auto&) { w.w2.device = Device::cuda(0); },
       StatusCode::kInvalidArgument, "expert 0: w2: got memory of cuda:0, need memory of cpu"},
      {"bf16", [](auto&, auto& w, auto&) { w.w13 = {}; }, StatusCode::kInvalidShape, "w13"},
      {"bf16", [](auto&, auto& w, auto&) { w.w13.strides[1] = 200; }, StatusCode::kInvalidLayout,
       "w13"},
      {"fp8-block", [](auto&, auto& w, auto&) { w.w13_scale = {}; }, StatusCode::kInvalidArgument,
       "w13_scale: got none"},
      {"fp8-block",
       [](auto&, auto& w, auto&) {
         set_shape(w.w2_scale, {6, 1, 2});
       },
       StatusCode::kInvalidShape, "w2_scale: got [1, 2], need [2, 1]"},
      {"fp8-block",
       [](auto&, auto&, auto& c) {
         c.weights.w2_scale.template as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
       },
       StatusCode::kInvalidArgument, "w2_scale: got nan at [1, 0]"},
      {"fp8-block",
       [](auto&, auto&, auto& c) {
         c.weights.w13_scale.template as<float>()[0] = std::numeric_limits<float>::infinity();
       },
       StatusCode::kInvalidArgument, "w13_scale: got inf"},
      {"fp8-block",
       [](auto&, auto&, auto& c) { c.weights.w13.template as<std::uint8_t>()[5] = 0x7F; },
       StatusCode::kInvalidArgument, "w13: got the NaN code 0x7F at [0, 5]"},
      {"fp8-bf16",
       [](auto&, auto&, auto& c) { c.weights.w2.template as<std::uint8_t>()[1] = 0xFF; },
       StatusCode::kInvalidArgument, "w2: got the NaN code 0xFF at [0, 1]"},
      {"bf16", [](auto&, auto& w, auto&) { w.w13_scale = w.w13; }, StatusCode::kInvalidArgument,
       "w13_scale"},
      {"nvfp4", [](auto&, auto& w, auto&) { w.w2_global_scale = {}; }, StatusCode::kInvalidArgument,
       "w2_global_scale: got none"},
      {"nvfp4",
       [](auto&, auto&, auto& c) { c.weights.w13_input_scale.template as<float>()[0] = 0; },
       StatusCode::kInvalidArgument, "w13_input_scale: got 0, need a positive scale"},
      {"nvfp4",
       [](auto&, auto&, auto& c) { c.weights.w13_scale.template as<std::uint8_t>()[1] = 0x7F; },
       StatusCode::kInvalidArgument, "w13_scale: got nan at [0, 1]"},
      {"mxfp8",
       [](auto&, auto&, auto& c) { c.weights.w2_scale.template as<std::uint8_t>()[0] = 0xFF; },
       StatusCode::kInvalidArgument, "w2_scale: got nan at [0, 0]"},
      {"gptq", [](auto&, auto&, auto& c) { c.weights.w2_perm.template as<std::int32_t>()[3] = 64; },
       StatusCode::kInvalidArgument, "w2_perm: got 64 at [3], need each of 0 .. 63 once"},
      {"gptq", [](auto&, auto& w, auto&) { w.w13_zero = {}; }, StatusCode::kInvalidArgument,
       "w13_zero: got none"},
      {"int8", [](auto&, auto& w, auto&) { w.w13_zero = w.w13_scale; },
       StatusCode::kInvalidArgument,
       "w13_zero: got [128], but I8 weights of this scheme have none"},
      {"int4-fp8",
       [](auto&, auto& w, auto&) {
         set_shape(w.w13_channel_scale, {6, 128});
       },
       StatusCode::kInvalidShape, "w13_channel_scale: got [128], need [256]"},
      {"bf16", [](auto& p, auto&, auto&) { p.has_expert_bias = true; },
       StatusCode::kInvalidArgument, "w13_bias: got none, has_expert_bias needs [128]"},
      {"bf16", [](auto&, auto& w, auto& c) { w.w2_bias = c.hidden_states.view(); },
       StatusCode::kInvalidArgument, "w2_bias"},
  };
  for (const BadWeights& bad : cases) {
    StandardCase c = make_case(3, small_problem(bad.quant), 2, DType::kBF16);
    StackedExpertWeights weights = c.weights.view();
    bad.spoil(c.problem, weights, c);
    const auto source = make_stacked_source(weights);
    const auto experts = choose_experts(c.problem).value()->create(c.problem, *source);
    ASSERT_FALSE(experts.ok()) << bad.words;
    expect_refused(experts.status(), bad.code, bad.words);
  }
}

TEST(StackedSource, RefusesAnIndexOutsideTheStack) {
  const StandardCase c = make_case(3, small_problem("bf16"), 2, DType::kBF16);
  const auto source = make_stacked_source(c.weights.view());
  EXPECT_TRUE(source->expert(5).ok());
  expect_refused(source->expert(6).status(), StatusCode::kInvalidArgument, "local expert 6");
  expect_refused(source->expert(-1).status(), StatusCode::kInvalidArgument, "local expert -1");
}

class RunArgs : public testing::TestWithParam<std::string> {
 protected:
  void refuse(const std::function<void(ExpertsArgs&)>& spoil, StatusCode code,
              std::string_view words) {
    StandardCase c = make_case(4, small_problem("bf16"), 3, DType::kBF16);
    const auto experts = test::make_backend(GetParam(), c);
    Tensor workspace = test::poisoned_bytes(experts->workspace_size(3).value() + 64);
    Tensor output = Tensor::zeros(DType::kF32, {3, 96}).value();
    ExpertsArgs args;
    args.hidden_states = c.hidden_states.view();
    args.topk_ids = c.routing.ids.view();
    args.topk_weights = c.routing.weights.view();
    args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
    args.output = output.view();
    ASSERT_TRUE(experts->run(args).ok()) << experts->run(args).to_string();
    spoil(args);
    expect_refused(experts->run(args), code, words);
  }
};

std::vector<std::string> standard_backends() {
  std::vector<std::string> names;
  for (const auto& r : explain_experts(small_problem("bf16"))) {
    if (r.accepted) names.push_back(r.name);
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(Backends, RunArgs, testing::ValuesIn(standard_backends()),
                         [](const auto& param) { return param.param; });

TEST_P(RunArgs, Shapes) {
  refuse(
      [](auto& a) {
        set_shape(a.hidden_states, {3, 48});
      },
      StatusCode::kInvalidShape, "hidden_states: got [3, 48], need [3, 96]");
  refuse([](auto& a) { set_shape(a.hidden_states, {288}); }, StatusCode::kInvalidShape,
         "hidden_states: got [288], need [M, 96]");
  refuse(
      [](auto& a) {
        set_shape(a.topk_ids, {3, 1});
      },
      StatusCode::kInvalidShape, "topk_ids: got [3, 1], need [3, 2]");
  refuse(
      [](auto& a) {
        set_shape(a.topk_weights, {2, 3});
      },
      StatusCode::kInvalidShape, "topk_weights");
  refuse(
      [](auto& a) {
        a.output = TensorView(a.output.data, DType::kF32, {2, 96});
      },
      StatusCode::kInvalidShape, "output: got [2, 96], need [3, 96]");
  static const std::vector<std::int32_t> short_map = {0, 1, 2};
  refuse([](auto& a) { a.expert_map = short_map; }, StatusCode::kInvalidShape,
         "expert_map: got [3], need [6]");
}

TEST_P(RunArgs, DTypesAndLayout) {
  refuse([](auto& a) { a.hidden_states.dtype = DType::kF8E4M3; }, StatusCode::kInvalidDType,
         "hidden_states: got F8_E4M3");
  refuse([](auto& a) { a.output.dtype = DType::kI32; }, StatusCode::kInvalidDType,
         "output: got I32");
  refuse([](auto& a) { a.topk_ids.dtype = DType::kI64; }, StatusCode::kInvalidDType,
         "topk_ids: got I64, need I32");
  refuse([](auto& a) { a.topk_weights.dtype = DType::kBF16; }, StatusCode::kInvalidDType,
         "topk_weights: got BF16, need F32");
  refuse([](auto& a) { a.hidden_states.strides[1] = 2; }, StatusCode::kInvalidLayout, "dense rows");
  refuse([](auto& a) { a.hidden_states.strides[0] = -96; }, StatusCode::kInvalidLayout,
         "stride -96");
  refuse([](auto& a) { a.output.strides[0] = 100; }, StatusCode::kInvalidLayout, "output");
  refuse([](auto& a) { a.hidden_states.data = nullptr; }, StatusCode::kInvalidArgument,
         "null pointer");
}

TEST_P(RunArgs, IdsAndMaps) {
  static const std::vector<std::int32_t> ids = {0, 1, 2, 6, 4, 5};
  refuse([](auto& a) { a.topk_ids.data = reinterpret_cast<const std::byte*>(ids.data()); },
         StatusCode::kInvalidArgument, "6");
  static const std::vector<std::int32_t> low = {0, 1, 2, 3, -2, 5};
  refuse([](auto& a) { a.topk_ids.data = reinterpret_cast<const std::byte*>(low.data()); },
         StatusCode::kInvalidArgument, "-2");
  static const std::vector<std::int32_t> map = {0, 1, 2, 3, 4, 6};
  refuse([](auto& a) { a.expert_map = map; }, StatusCode::kInvalidArgument, "expert_map");
}

TEST_P(RunArgs, WorkspaceAndAliasing) {
  refuse([](auto& a) { a.workspace = a.workspace.first(64); }, StatusCode::kWorkspaceTooSmall,
         "workspace: got 64 bytes, need");
  refuse(
      [](auto& a) {
        a.workspace = {static_cast<std::byte*>(nullptr), a.workspace.size()};
      },
      StatusCode::kInvalidArgument, "workspace: got null, need");
  refuse([](auto& a) { a.workspace = a.workspace.subspan(1); }, StatusCode::kInvalidLayout,
         "workspace");
  refuse(
      [](auto& a) {
        a.hidden_states = ConstTensorView(a.output.data, DType::kBF16, {3, 96});
      },
      StatusCode::kAliasing, "output overlaps hidden_states");
  refuse([](auto& a) { a.output.data = a.workspace.data(); }, StatusCode::kAliasing,
         "workspace overlaps output");
  refuse([](auto& a) { a.topk_ids.data = a.workspace.data(); }, StatusCode::kInvalidArgument,
         "");  // poison is no id
}

TEST(RunArgsBatched, CountsAndShapes) {
  MoeProblem p = small_problem("bf16");
  p.format = ActivationFormat::kBatched;
  p.max_tokens = 4;
  const StandardCase c = make_case(4, small_problem("bf16"), 3, DType::kBF16);
  const auto source = make_stacked_source(c.weights.view());
  for (const auto& row : explain_experts(p)) {
    if (!row.accepted) continue;
    const auto experts = choose_experts(p, row.name).value()->create(p, *source).value();
    Tensor workspace = test::poisoned_bytes(experts->workspace_size(4).value());
    test::Rng rng(1);
    const Tensor slabs = test::random_normal(rng, DType::kBF16, {6, 4, 96});
    Tensor output = Tensor::zeros(DType::kF32, {6, 4, 96}).value();
    const std::vector<std::int32_t> good = {4, 0, 1, 2, 0, 3}, too_many = {4, 0, 5, 2, 0, 3},
                                    negative = {4, 0, -1, 2, 0, 3}, few = {1, 2};
    ExpertsArgs args;
    args.hidden_states = slabs.view();
    args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
    args.output = output.view();
    args.expert_num_tokens = good;
    EXPECT_TRUE(experts->run(args).ok());
    args.expert_num_tokens = too_many;
    expect_refused(experts->run(args), StatusCode::kInvalidArgument,
                   "expert_num_tokens[2]: got 5, need 0 .. 4");
    args.expert_num_tokens = negative;
    expect_refused(experts->run(args), StatusCode::kInvalidArgument, "got -1");
    args.expert_num_tokens = few;
    expect_refused(experts->run(args), StatusCode::kInvalidShape,
                   "expert_num_tokens: got [2], need [6]");
    args.expert_num_tokens = good;
    args.hidden_states = ConstTensorView(slabs.data(), DType::kBF16, {24, 96});
    expect_refused(experts->run(args), StatusCode::kInvalidShape, "need [6, T, 96]");
  }
}

TEST(WorkspaceSize, IsMonotoneAndRefusesNegatives) {
  const StandardCase c = make_case(4, small_problem("bf16"), 3, DType::kBF16);
  for (const std::string& name : standard_backends()) {
    const auto experts = test::make_backend(name, c);
    std::int64_t last = 0;
    for (const std::int64_t tokens : {0, 1, 2, 3, 16, 512}) {
      const std::int64_t bytes = experts->workspace_size(tokens).value();
      EXPECT_GE(bytes, last) << name;
      last = bytes;
    }
    const Status negative = experts->workspace_size(-1).status();
    EXPECT_EQ(negative.code(), StatusCode::kInvalidArgument) << name;
    EXPECT_NE(negative.message().find("tokens: got -1"), std::string::npos) << negative.message();
    EXPECT_GT(experts->weight_bytes(), 0);
    EXPECT_FALSE(experts->determinism().empty());
    EXPECT_EQ(experts->name(), name);
  }
}

}  // namespace
}  // namespace moesaic
