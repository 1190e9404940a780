// Calls that bring their routing, or part of it: logits, ids and weights, tokens, padding.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/numerics.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::expect_refusal;
using test::expect_same;
using test::Feature;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::must_run;
using test::random_hidden;
using test::run_args;
using test::small_spec;
using test::to_doubles;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Calls in steps of 5 tokens.
FusedMoE::Options in_steps(int threads = 1) {
  FusedMoE::Options options;
  options.max_tokens = 5;
  options.num_threads = threads;
  return options;
}

Tensor ints(DType dtype, const Tensor& ids) {
  Tensor wide = Tensor::zeros(dtype, ids.shape()).value();
  for (std::int64_t i = 0; i < ids.bytes() / 4; ++i) {
    const std::int32_t id = ids.as<std::int32_t>()[i];
    if (dtype == DType::kI64) {
      wide.as<std::int64_t>()[i] = id;
    } else {
      wide.as<std::int32_t>()[i] = id;
    }
  }
  return wide;
}

TEST(GivenRouting, TheLayersOwnLogitsAndIdsGiveItsBits) {
  for (const Feature& f : test::routing_features()) {
    const LayerTensors t = make_tensors(51, f.spec());
    for (const int threads : {1, 3}) {
      const FusedMoE layer = make_layer(t, in_steps(threads));
      const Tensor x = random_hidden(52, 23, t.spec.hidden_size);
      FusedMoE::Args args;
      args.hidden_states = x.view();
      const LayerRun own = must_run(layer, args);
      args.router_logits = own.logits.view();
      const LayerRun by_logits = must_run(layer, args);
      expect_same(by_logits.output, own.output, f.name + " by logits");
      expect_same(by_logits.topk_ids, own.topk_ids, f.name);
      expect_same(by_logits.topk_weights, own.topk_weights, f.name);
      expect_same(by_logits.logits, own.logits, f.name);
      if (t.spec.routing.num_zero_experts > 0) continue;  // whose weight ids do not carry
      args.router_logits = {};
      args.topk_weights = own.topk_weights.view();
      for (const DType dtype : {DType::kI32, DType::kI64, DType::kU32}) {
        const Tensor ids = ints(dtype, own.topk_ids);
        args.topk_ids = ids.view();
        const LayerRun by_ids = must_run(layer, args);
        expect_same(by_ids.output, own.output, f.name + " by ids");
        expect_same(by_ids.topk_ids, own.topk_ids, f.name);
        expect_same(by_ids.topk_weights, own.topk_weights, f.name);
      }
    }
  }
}

TEST(GivenRouting, NarrowLogitsAreWidenedExactly) {
  const LayerTensors t = make_tensors(53, test::deepseek_like());
  const FusedMoE layer = make_layer(t, in_steps());
  const Tensor x = random_hidden(54, 9, t.spec.hidden_size);
  test::Rng rng(55);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor narrow = random_normal(rng, dtype, {9, 8}, 2.0);
    Tensor wide = Tensor::zeros(DType::kF32, {9, 8}).value();
    const auto values = to_doubles(narrow.view());
    for (std::size_t i = 0; i < values.size(); ++i) {
      wide.as<float>()[i] = static_cast<float>(values[i]);
    }
    FusedMoE::Args args;
    args.hidden_states = x.view();
    args.router_logits = narrow.view();
    const LayerRun got = must_run(layer, args);
    expect_same(got.logits, wide, "logits");
    args.router_logits = wide.view();
    expect_same(got.output, must_run(layer, args).output, "output");
  }
}

// A weight on the input is rounded as rows are, and all of its row with it.
TEST(GivenRouting, RoundedWeightsOnTheInputAreWithinTheLayersBound) {
  MoeLayerSpec spec = test::llama4_like();
  spec.shared.intermediate_size = 0;
  const LayerTensors t = make_tensors(57, spec);
  const Tensor x = random_hidden(58, 32, spec.hidden_size);
  Tensor ids = Tensor::zeros(DType::kI32, {32, 1}).value();
  Tensor weights = Tensor::zeros(DType::kF32, {32, 1}).value();
  for (int row = 0; row < 32; ++row) {
    ids.as<std::int32_t>()[row] = row % static_cast<int>(spec.num_experts);
    weights.as<float>()[row] = 0.50195F;  // 0.5 in BF16
  }
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.topk_ids = ids.view();
  args.topk_weights = weights.view();
  const auto output = [&](const char* quant, double* bound) {
    FusedMoE::Options options = in_steps();
    options.quant = quant;
    const FusedMoE layer = make_layer(t, options);
    *bound = layer.quant().output_bound;
    return to_doubles(must_run(layer, args).output.view());
  };
  double bound = 0, fp32 = 0;
  const auto rounded = output("bf16", &bound);
  const auto result = compare(rounded, output("f32", &fp32));
  EXPECT_LE(result.rel_l2, bound) << result.describe;
  EXPECT_GT(result.rel_l2, quant_scheme_from_name("bf16")->output_bound) << "bf16's would do";
  EXPECT_EQ(fp32, quant_scheme_from_name("f32")->output_bound);
}

// Final weights: neither renormalised nor scaled; -1 without its weight, an expert twice.
TEST(GivenRouting, WeightsAndIdsAreTakenAsTheyAre) {
  for (const Feature& f : test::common_features()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(56, f.spec());
    FusedMoE::Options options = in_steps();
    options.quant = "f32";
    const FusedMoE layer = make_layer(t, options);
    const Tensor x = random_hidden(57, 12, t.spec.hidden_size);
    const std::int64_t k = t.spec.routing.top_k;
    test::Rng rng(58);
    Tensor weights = random_normal(rng, DType::kF32, {12, k}, 2.0);
    Tensor ids = Tensor::zeros(DType::kI32, {12, k}).value();
    for (std::int64_t i = 0; i < 12 * k; ++i) {
      ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(rng.integer(-1, 7));
      if (ids.as<std::int32_t>()[i] < 0) weights.as<float>()[i] = kNan;
    }
    if (k > 1) ids.as<std::int32_t>()[0] = ids.as<std::int32_t>()[1] = 3;
    if (k > 1) weights.as<float>()[0] = 0.75F, weights.as<float>()[1] = -2;
    FusedMoE::Args args;
    args.hidden_states = x.view();
    args.topk_weights = weights.view();
    args.topk_ids = ids.view();
    const LayerRun run = must_run(layer, args);
    const auto result = compare(to_doubles(run.output.view()), test::layer_oracle(t, x, run));
    EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
    expect_same(run.topk_ids, ids, "ids");
  }
}

TEST(GivenRouting, AScaledOutputIsScaledOnce) {
  const LayerTensors t = make_tensors(59, test::scaled_output());
  FusedMoE::Options options = in_steps();
  options.quant = "f32";
  const FusedMoE layer = make_layer(t, options);
  const Tensor x = random_hidden(60, 6, t.spec.hidden_size);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const LayerRun own = must_run(layer, args);
  args.topk_weights = own.topk_weights.view();
  args.topk_ids = own.topk_ids.view();
  const LayerRun run = must_run(layer, args);
  const auto result = compare(to_doubles(run.output.view()), test::layer_oracle(t, x, run, 2.5));
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
}

TEST(GivenRouting, IdsBehindTheExpertsNameIdentityExperts) {
  const LayerTensors t = make_tensors(61, test::with_identity_experts());
  FusedMoE::Options options = in_steps();
  options.quant = "f32";
  const FusedMoE layer = make_layer(t, options);
  const Tensor x = random_hidden(62, 2, 64);
  const float w[] = {0.5F, 0.25F, 2.0F, 0.5F, 0.25F, 2.0F};
  const std::int32_t identity[] = {2, 8, 10, 2, -1, -1};
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.topk_weights = {reinterpret_cast<const std::byte*>(w), DType::kF32, {2, 3}};
  args.topk_ids = {reinterpret_cast<const std::byte*>(identity), DType::kI32, {2, 3}};
  const LayerRun run = must_run(layer, args);
  EXPECT_EQ(run.topk_ids.as<std::int32_t>()[1], 0) << "as the router leaves such a slot";
  EXPECT_EQ(run.topk_weights.as<float>()[1], 0.0F);
  auto want = test::layer_oracle(t, x, run);
  const auto xs = to_doubles(x.view());
  for (std::size_t h = 0; h < 64; ++h) want[h] += 2.25 * xs[h];
  const auto result = compare(to_doubles(run.output.view()), want);
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
}

TEST(GivenRouting, ALayerWithoutAGateNeedsItWithEveryCall) {
  const LayerTensors t = make_tensors(63, test::deepseek_like());
  const Tensor x = random_hidden(64, 7, t.spec.hidden_size);
  const FusedMoE whole = make_layer(t, in_steps());
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const LayerRun own = must_run(whole, args);
  MoeLayerWeights weights = t.weights();
  weights.tensors.gate_weight = Tensor();
  expect_refusal(FusedMoE::create(std::move(weights), in_steps()).status(),
                 StatusCode::kInvalidArgument, {"gate_weight: got none", "include_gate"});
  weights = t.weights();
  weights.tensors.gate_weight = Tensor();
  FusedMoE::Options options = in_steps();
  options.include_gate = false;
  const FusedMoE layer = std::move(FusedMoE::create(std::move(weights), options)).value();
  EXPECT_LT(layer.weight_bytes(), whole.weight_bytes());
  for (const CandidateReport& row : layer.explain()) EXPECT_NE(row.stage, "gate");
  expect_refusal(run_args(layer, args).status(), StatusCode::kInvalidArgument,
                 {"router_logits: got none", "no gate", "topk_ids"});
  args.router_logits = own.logits.view();
  expect_same(must_run(layer, args).output, own.output, "by logits");
  args.router_logits = {};
  args.topk_weights = own.topk_weights.view();
  args.topk_ids = own.topk_ids.view();
  expect_same(must_run(layer, args).output, own.output, "by ids");
  EXPECT_TRUE(layer
                  .forward(ConstTensorView(nullptr, DType::kBF16, {0, 64}),
                           TensorView(nullptr, DType::kF32, {0, 64}))
                  .ok())
      << "no rows, nothing to route";
}

TEST(GivenRouting, NanLogitsAreTheRoutersAndANanWeightStaysInItsRow) {
  const LayerTensors t = make_tensors(65, small_spec());
  const FusedMoE layer = make_layer(t, in_steps());
  const Tensor x = random_hidden(66, 3, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const LayerRun own = must_run(layer, args);
  Tensor logits = Tensor::zeros(DType::kF32, {3, 8}).value();
  std::memcpy(logits.data(), own.logits.data(), static_cast<std::size_t>(logits.bytes()));
  for (int e = 0; e < 8; ++e) logits.as<float>()[8 + e] = kNan;
  args.router_logits = logits.view();
  const LayerRun run = must_run(layer, args);
  EXPECT_EQ(run.topk_ids.as<std::int32_t>()[2], 0);
  EXPECT_EQ(run.topk_ids.as<std::int32_t>()[3], 1);
  const auto row_is = [&](const LayerRun& got, std::int64_t row, auto&& want) {
    for (std::int64_t h = 0; h < 64; ++h) {
      if (!want(got.output.as<float>()[row * 64 + h], own.output.as<float>()[row * 64 + h])) {
        return false;
      }
    }
    return true;
  };
  const auto same = [](float a, float b) { return a == b; };
  EXPECT_TRUE(row_is(run, 0, same) && row_is(run, 2, same));
  EXPECT_TRUE(row_is(run, 1, [](float a, float) { return a == 0; }));

  Tensor weights = Tensor::zeros(DType::kF32, {3, 2}).value();
  std::memcpy(weights.data(), own.topk_weights.data(), static_cast<std::size_t>(weights.bytes()));
  weights.as<float>()[3] = kNan;
  args.router_logits = {};
  args.topk_weights = weights.view();
  args.topk_ids = own.topk_ids.view();
  const LayerRun spoiled = must_run(layer, args);
  EXPECT_TRUE(row_is(spoiled, 0, same) && row_is(spoiled, 2, same));
  EXPECT_TRUE(row_is(spoiled, 1, [](float a, float) { return std::isnan(a); }));
}

TEST(GivenRouting, PaddingReachesNoExpertAndIsZero) {
  for (const Feature& f : test::routing_features()) {
    SCOPED_TRACE(f.name);
    const LayerTensors t = make_tensors(67, f.spec());
    const FusedMoE layer = make_layer(t, in_steps());
    const std::int64_t hidden = t.spec.hidden_size, k = t.spec.routing.top_k;
    Tensor x = random_hidden(68, 8, hidden);
    FusedMoE::Args args;
    args.hidden_states = x.view();
    const LayerRun own = must_run(layer, args);
    for (std::int64_t h = 0; h < hidden; ++h)
      x.as<std::uint16_t>()[6 * hidden + h] = 0x7FC0;  // NaN
    const std::uint8_t mask[8] = {0, 1, 0, 0, 0, 0, 255, 0};
    args.padding_mask = {reinterpret_cast<const std::byte*>(mask), DType::kU8, {8}};
    Tensor ids = ints(DType::kI64, own.topk_ids);
    ids.as<std::int64_t>()[6 * k] = std::int64_t{1} << 40;  // whatever stands there
    for (int way = 0; way < 3; ++way) {
      if (way == 1) args.router_logits = own.logits.view();
      if (way == 2) {
        if (t.spec.routing.num_zero_experts > 0) continue;
        args.router_logits = {};
        args.topk_weights = own.topk_weights.view();
        args.topk_ids = ids.view();
      }
      const LayerRun run = must_run(layer, args);
      for (std::int64_t row = 0; row < 8; ++row) {
        for (std::int64_t h = 0; h < hidden; ++h) {
          const float want = mask[row] != 0 ? 0.0F : own.output.as<float>()[row * hidden + h];
          ASSERT_EQ(run.output.as<float>()[row * hidden + h], want) << way << " row " << row;
        }
        EXPECT_EQ(run.topk_ids.as<std::int32_t>()[row * k] == -1, mask[row] != 0);
      }
    }
  }
}

TEST(GivenRouting, HashLayersRouteByTokenId) {
  const LayerTensors t = make_tensors(69, test::hash_routed());
  FusedMoE::Options options = in_steps();
  options.quant = "f32";
  const FusedMoE layer = make_layer(t, options);
  const Tensor x = random_hidden(70, 12, t.spec.hidden_size);
  std::vector<std::int32_t> tokens = {0, 10, 3, 3, 7, 1, 9, 2, 5, 6, 4, 8};
  FusedMoE::Args args;
  args.hidden_states = x.view();
  expect_refusal(run_args(layer, args).status(), StatusCode::kInvalidArgument,
                 {"input_ids: got none", "token id"});
  args.input_ids = {reinterpret_cast<const std::byte*>(tokens.data()), DType::kI32, {12}};
  const LayerRun own = must_run(layer, args);
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    for (std::size_t j = 0; j < 2; ++j) {
      EXPECT_EQ(own.topk_ids.as<std::int32_t>()[row * 2 + j],
                t.hash_table.as<std::int32_t>()[static_cast<std::size_t>(tokens[row]) * 2 + j]);
    }
  }
  const auto result = compare(to_doubles(own.output.view()), test::layer_oracle(t, x, own));
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
  args.router_logits = own.logits.view();
  expect_same(must_run(layer, args).output, own.output, "by logits");
  args.router_logits = {};
  tokens[7] = 11;
  expect_refusal(run_args(layer, args).status(), StatusCode::kInvalidArgument,
                 {"input_ids: got 11 at [7]", "0 to 10"});
  args.input_ids = {};
  args.topk_ids = own.topk_ids.view();
  args.topk_weights = own.topk_weights.view();
  expect_same(must_run(layer, args).output, own.output, "by ids, which need no tokens");
  EXPECT_TRUE(explain_layer(t.spec, options).ok());
}

TEST(GivenRouting, ThreeDimensionsAreRowsInOrder) {
  const LayerTensors t = make_tensors(71, small_spec());
  const FusedMoE layer = make_layer(t, in_steps());
  const Tensor x = random_hidden(72, 12, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const LayerRun flat = must_run(layer, args);
  args.hidden_states = {x.data(), DType::kBF16, {3, 4, 64}};
  expect_same(must_run(layer, args).output, flat.output, "output [M, H]");
  Tensor out = Tensor::zeros(DType::kF32, {3, 4, 64}).value();
  ASSERT_TRUE(layer.forward(args.hidden_states, out.view()).ok());
  EXPECT_EQ(std::memcmp(out.data(), flat.output.data(), static_cast<std::size_t>(out.bytes())), 0);
  // Every second token of each sequence: rows are equally far apart only within a sequence.
  args.hidden_states.shape = {3, 2, 64};
  args.hidden_states.strides = {4 * 64, 2 * 64, 1};
  EXPECT_TRUE(run_args(layer, args).ok());
  args.hidden_states.strides = {4 * 64, 64, 1};
  expect_refusal(run_args(layer, args).status(), StatusCode::kInvalidLayout, {"hidden_states"});
  Tensor wrong = Tensor::zeros(DType::kF32, {4, 3, 64}).value();
  expect_refusal(layer.forward(ConstTensorView(x.data(), DType::kBF16, {3, 4, 64}), wrong.view()),
                 StatusCode::kInvalidShape, {"output"});
}

TEST(GivenRouting, CaptureSeesWhateverWasChosen) {
  const LayerTensors t = make_tensors(73, small_spec());
  std::vector<std::int32_t> seen;
  FusedMoE::Options options = in_steps();
  options.capture = [&](ConstTensorView ids) {
    const std::int32_t* p = ids.as<std::int32_t>();
    seen.insert(seen.end(), p, p + ids.dim(0) * ids.dim(1));
  };
  const FusedMoE layer = make_layer(t, options);
  const Tensor x = random_hidden(74, 12, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const LayerRun own = must_run(layer, args);
  const std::vector<std::int32_t> want(own.topk_ids.as<std::int32_t>(),
                                       own.topk_ids.as<std::int32_t>() + 24);
  EXPECT_EQ(seen, want);
  seen.clear();
  args.topk_ids = own.topk_ids.view();
  args.topk_weights = own.topk_weights.view();
  must_run(layer, args);
  EXPECT_EQ(seen, want);
  options.capture = [](ConstTensorView) { throw std::runtime_error("no room"); };
  expect_refusal(run_args(make_layer(t, options), args).status(), StatusCode::kInvalidArgument,
                 {"capture", "no room"});
}

TEST(GivenRouting, EveryMistakeIsNamed) {
  const LayerTensors t = make_tensors(75, small_spec());
  const FusedMoE layer = make_layer(t, in_steps());
  const Tensor x = random_hidden(76, 6, 64);
  Tensor logits = Tensor::zeros(DType::kF32, {6, 8}).value();
  Tensor weights = Tensor::zeros(DType::kF32, {6, 2}).value();
  Tensor ids = Tensor::zeros(DType::kI32, {6, 2}).value();
  Tensor output = Tensor::zeros(DType::kF32, {6, 64}).value();
  FusedMoE::Args good;
  good.hidden_states = x.view();
  good.output = output.view();
  const auto refused = [&](auto&& change, StatusCode code,
                           std::initializer_list<const char*> words) {
    FusedMoE::Args args = good;
    args.topk_weights = weights.view();
    args.topk_ids = ids.view();
    change(args);
    expect_refusal(layer.forward(args), code, words);
  };
  using Args = FusedMoE::Args;
  refused([&](Args& a) { a.router_logits = logits.view(); }, StatusCode::kInvalidArgument,
          {"router_logits", "topk_ids", "one or the other"});
  refused([](Args& a) { a.topk_weights = {}; }, StatusCode::kInvalidArgument,
          {"topk_weights: got none"});
  refused([](Args& a) { a.topk_ids = {}; }, StatusCode::kInvalidArgument, {"topk_ids: got none"});
  refused([&](Args& a) { a.trace.router_logits = logits.view(); }, StatusCode::kInvalidArgument,
          {"trace.router_logits"});
  refused([](Args& a) { a.topk_weights.dtype = DType::kBF16; }, StatusCode::kInvalidDType,
          {"topk_weights: got BF16"});
  refused([](Args& a) { a.topk_ids.dtype = DType::kF32; }, StatusCode::kInvalidDType,
          {"topk_ids: got F32", "I32, I64 or U32"});
  refused(
      [](Args& a) {
        a.topk_ids.shape = {6, 3};
      },
      StatusCode::kInvalidShape, {"topk_ids: got [6, 3]", "[6, 2]"});
  refused(
      [](Args& a) {
        a.topk_weights.shape = {5, 2};
      },
      StatusCode::kInvalidShape, {"topk_weights"});
  refused([](Args& a) { a.topk_ids.strides[0] = 4; }, StatusCode::kInvalidLayout, {"topk_ids"});
  refused([](Args& a) { a.topk_ids.device = Device::cuda(0); }, StatusCode::kInvalidArgument,
          {"topk_ids", "cuda:0"});
  refused([&](Args& a) { a.trace.topk_ids = ids.view(); }, StatusCode::kAliasing,
          {"trace.topk_ids", "topk_ids"});
  refused(
      [&](Args& a) {
        a.topk_weights = {output.data(), DType::kF32, {6, 2}};
      },
      StatusCode::kAliasing, {"output", "topk_weights"});
  refused(
      [&](Args& a) {
        a.padding_mask = {ids.data(), DType::kU8, {5}};
      },
      StatusCode::kInvalidShape, {"padding_mask: got [5]"});
  refused(
      [&](Args& a) {
        a.input_ids = {logits.data(), DType::kF32, {6}};
      },
      StatusCode::kInvalidDType, {"input_ids"});
  ids.as<std::int32_t>()[9] = 8;
  refused([](Args&) {}, StatusCode::kInvalidArgument, {"topk_ids: got 8 at [4, 1]", "-1 to 7"});
  ids.as<std::int32_t>()[9] = -1;
  refused([](Args& a) { a.topk_ids.dtype = DType::kU32; }, StatusCode::kInvalidArgument,
          {"topk_ids: got 4294967295 at [4, 1]"});
  const auto bad_logits = [&](auto&& change, StatusCode code,
                              std::initializer_list<const char*> words) {
    FusedMoE::Args args = good;
    args.router_logits = logits.view();
    change(args);
    expect_refusal(layer.forward(args), code, words);
  };
  bad_logits(
      [](Args& a) {
        a.router_logits.shape = {6, 7};
      },
      StatusCode::kInvalidShape, {"router_logits: got [6, 7]", "[6, 8]"});
  bad_logits([](Args& a) { a.router_logits.dtype = DType::kI32; }, StatusCode::kInvalidDType,
             {"router_logits: got I32"});
  bad_logits([&](Args& a) { a.trace.router_logits = logits.view(); }, StatusCode::kAliasing,
             {"trace.router_logits"});
}

}  // namespace
}  // namespace moesaic
