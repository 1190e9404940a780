#include "moesaic/fused_moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "cpu/team.h"
#include "layer/layer_case.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::deepseek_like;
using test::Feature;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::random_hidden;
using test::run_layer;
using test::same_bits;
using test::small_spec;
using test::to_doubles;
using test::with_shared;

FusedMoE::Options with_quant(std::string quant) {
  FusedMoE::Options options;
  options.quant = std::move(quant);
  options.num_threads = 1;
  return options;
}

TEST(FusedMoE, EqualsTheFloat64OracleFeatureByFeature) {
  std::vector<Feature> features = test::common_features();
  features.push_back({"biases and swigluoai", [] {
                        MoeLayerSpec spec = small_spec();
                        spec.has_router_bias = spec.has_expert_bias = true;
                        spec.routing.method = RoutingMethod::kTopKSoftmax;
                        spec.activation = make_activation("swigluoai").value();
                        return spec;
                      }});
  features.push_back({"not gated", [] {
                        MoeLayerSpec spec = small_spec();
                        spec.activation = make_activation("relu2_no_mul").value();
                        return spec;
                      }});
  for (const Feature& feature : features) {
    SCOPED_TRACE(feature.name);
    const LayerTensors t = make_tensors(1, feature.spec());
    const Tensor x = random_hidden(2, 11, t.spec.hidden_size);
    const FusedMoE f32 = make_layer(t, with_quant("f32"));
    const LayerRun run = run_layer(f32, x);
    const auto result = compare(to_doubles(run.output.view()), layer_oracle(t, x, run));
    EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
    const FusedMoE bf16 = make_layer(t, with_quant("as-is"));
    EXPECT_EQ(bf16.quant().name, "bf16");
    const LayerRun rounded = run_layer(bf16, x);
    const auto close = compare(to_doubles(rounded.output.view()), layer_oracle(t, x, rounded));
    EXPECT_LE(close.rel_l2, bf16.quant().output_bound) << close.describe;
  }
}

TEST(FusedMoE, LogitsAreFp32ProductsOfTheStoredGate) {
  const LayerTensors t = make_tensors(3, small_spec());
  const Tensor x = random_hidden(4, 6, 64);
  const LayerRun run = run_layer(make_layer(t), x);
  const auto xs = to_doubles(x.view()), w = to_doubles(t.gate_weight.view());
  std::vector<double> want;
  for (std::size_t m = 0; m < 6; ++m) {
    for (std::size_t e = 0; e < 8; ++e) {
      double sum = 0;
      for (std::size_t h = 0; h < 64; ++h) sum += xs[m * 64 + h] * w[e * 64 + h];
      want.push_back(sum);
    }
  }
  const auto result = compare(to_doubles(run.logits.view()), want);
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;  // bf16 logits would be at 2e-3
}

// A factor of 4 scales every fp32 number exactly, wherever it acts, if it acts once.
TEST(FusedMoE, TheScalingFactorActsExactlyOnce) {
  struct Place {
    const char* name;
    bool on_output;
    RoutingMethod method;
  };
  for (const Place& place :
       {Place{"router", false, RoutingMethod::kTopK}, Place{"output", true, RoutingMethod::kTopK},
        Place{"grouped router", false, RoutingMethod::kGroupedTopK},
        Place{"unscalable router", true, RoutingMethod::kLlama4}}) {
    SCOPED_TRACE(place.name);
    MoeLayerSpec spec = small_spec();
    spec.routing.method = place.method;
    if (place.method == RoutingMethod::kLlama4) spec.routing.renormalize = false;
    LayerTensors t = make_tensors(5, spec);
    const Tensor x = random_hidden(6, 5, 64);
    const LayerRun one = run_layer(make_layer(t, with_quant("f32")), x);
    t.spec.routing.routed_scaling_factor = 4.0;
    t.spec.routing.scale_on_output = place.on_output;
    const LayerRun four = run_layer(make_layer(t, with_quant("f32")), x);
    for (std::int64_t i = 0; i < 5 * 64; ++i) {
      ASSERT_EQ(four.output.as<float>()[i], 4.0F * one.output.as<float>()[i]);
    }
    const float weights = place.on_output ? 1.0F : 4.0F;
    for (std::int64_t i = 0; i < 10; ++i) {
      ASSERT_EQ(four.topk_weights.as<float>()[i], weights * one.topk_weights.as<float>()[i]);
    }
  }
}

// The factor is for routed experts only: shared experts are never scaled.
TEST(FusedMoE, TheScalingFactorLeavesSharedExpertsAlone) {
  for (const bool on_output : {false, true}) {
    MoeLayerSpec spec = with_shared(true);
    spec.routing.routed_scaling_factor = 2.5;
    spec.routing.scale_on_output = on_output;
    const LayerTensors t = make_tensors(7, spec);
    const Tensor x = random_hidden(8, 5, 64);
    const LayerRun run = run_layer(make_layer(t, with_quant("f32")), x);
    const auto want = layer_oracle(t, x, run, on_output ? 2.5 : 1.0);
    const auto result = compare(to_doubles(run.output.view()), want);
    EXPECT_LE(result.rel_l2, 1e-6) << on_output << ": " << result.describe;
  }
}

// The bound is the layer's: here only the shared expert rounds activations to FP8.
TEST(FusedMoE, TheBoundCoversASharedExpertInAnotherFormat) {
  MoeLayerSpec spec = with_shared(false);
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  const LayerTensors plain = make_tensors(31, spec);
  spec.quant = quant_scheme_from_name("fp8-block").value();
  const LayerTensors coded = make_tensors(31, spec);
  const auto layer = [&](const std::string& quant) {
    MoeLayerWeights w = plain.weights();
    MoeLayerWeights c = coded.weights();
    w.shared = std::move(c.shared);
    w.shared_quant = c.shared_quant;
    return FusedMoE::create(std::move(w), with_quant(quant)).value();
  };
  const Tensor x = random_hidden(32, 24, spec.hidden_size);
  const FusedMoE mixed = layer("as-is");
  const auto result = compare(to_doubles(run_layer(mixed, x).output.view()),
                              to_doubles(run_layer(layer("f32"), x).output.view()));
  EXPECT_EQ(mixed.quant().name, "bf16");
  EXPECT_EQ(mixed.quant().output_bound, spec.quant.output_bound);
  EXPECT_LE(result.rel_l2, mixed.quant().output_bound) << result.describe;
  EXPECT_GT(result.rel_l2, plain.spec.quant.output_bound) << "bf16's bound would do";
}

TEST(FusedMoE, BitsDoNotDependOnSplitBatchOrderOrThreads) {
  for (const char* quant : {"f32", "bf16"}) {
    const LayerTensors t = make_tensors(9, deepseek_like());
    const Tensor x = random_hidden(10, 13, 64);
    FusedMoE::Options options = with_quant(quant);
    const LayerRun want = run_layer(make_layer(t, options), x);
    std::string why;
    for (const std::int64_t max_tokens : {1, 2, 5, 12, 13}) {
      options.max_tokens = max_tokens;
      const LayerRun got = run_layer(make_layer(t, options), x);
      EXPECT_TRUE(same_bits(got.output.view(), want.output.view(), &why)) << max_tokens << why;
      EXPECT_TRUE(same_bits(got.logits.view(), want.logits.view(), &why)) << max_tokens << why;
      EXPECT_TRUE(same_bits(got.topk_ids.view(), want.topk_ids.view(), &why)) << max_tokens << why;
      EXPECT_TRUE(same_bits(got.topk_weights.view(), want.topk_weights.view(), &why)) << why;
    }
    options.num_threads = 3;
    const cpu::ScopedTeams teams;
    const FusedMoE threaded = make_layer(t, options);
    EXPECT_TRUE(same_bits(run_layer(threaded, x).output.view(), want.output.view(), &why)) << why;
    Tensor reversed = Tensor::zeros(DType::kBF16, {13, 64}).value();
    for (std::int64_t r = 0; r < 13; ++r) {
      std::copy_n(x.as<std::uint16_t>() + (12 - r) * 64, 64, reversed.as<std::uint16_t>() + r * 64);
    }
    const LayerRun back = run_layer(threaded, reversed);
    for (std::int64_t i = 0; i < 13 * 64; ++i) {
      ASSERT_EQ(back.output.as<float>()[i], want.output.as<float>()[(12 - i / 64) * 64 + i % 64]);
    }
  }
}

TEST(FusedMoE, TheOutputIsRoundedOnce) {
  for (const MoeLayerSpec& spec : {small_spec(), deepseek_like()}) {
    const LayerTensors t = make_tensors(11, spec);
    const Tensor x = random_hidden(12, 4, 64);
    const FusedMoE layer = make_layer(t, with_quant("f32"));
    const LayerRun wide = run_layer(layer, x);
    const LayerRun narrow = run_layer(layer, x, DType::kBF16);
    for (std::int64_t i = 0; i < 4 * 64; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, wide.output.as<float>() + i, 4);
      bits += 0x7FFFU + ((bits >> 16) & 1U);
      ASSERT_EQ(narrow.output.as<std::uint16_t>()[i], bits >> 16);
    }
  }
}

TEST(FusedMoE, ZeroTokensStridedRowsAndSeveralCallers) {
  const LayerTensors t = make_tensors(13, with_shared(true));
  const FusedMoE layer = make_layer(t, with_quant("bf16"));
  EXPECT_EQ(run_layer(layer, random_hidden(1, 0, 64)).output.bytes(), 0);
  const Tensor x = random_hidden(14, 3, 64);
  const LayerRun want = run_layer(layer, x);
  Tensor wide = Tensor::uninitialized(DType::kBF16, {3, 100}).value();
  test::poison(wide.view());
  for (int r = 0; r < 3; ++r) {
    std::copy_n(x.as<std::uint16_t>() + r * 64, 64, wide.as<std::uint16_t>() + r * 100 + 4);
  }
  ConstTensorView view(wide.data() + 8, DType::kBF16, {3, 64});
  view.strides[0] = 100;
  std::vector<Tensor> outputs;
  for (int i = 0; i < 3; ++i) outputs.push_back(Tensor::zeros(DType::kF32, {3, 64}).value());
  std::vector<std::thread> threads;
  for (Tensor& output : outputs) {
    threads.emplace_back([&] { EXPECT_TRUE(layer.forward(view, output.view()).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  std::string why;
  for (const Tensor& output : outputs) {
    EXPECT_TRUE(same_bits(output.view(), want.output.view(), &why)) << why;
  }
}

TEST(FusedMoE, ZeroExpertsAddTheirShareOfTheInputLast) {
  MoeLayerSpec spec = small_spec();
  spec.routing.method = RoutingMethod::kZeroExpert;
  spec.routing.num_zero_experts = 3;
  spec.routing.has_correction_bias = true;
  spec.routing.renormalize = false;
  spec.routing.top_k = 4;
  spec.activation_dtype = DType::kF32;
  const LayerTensors t = make_tensors(15, spec);
  const Tensor x = random_hidden(16, 9, 64, DType::kF32);
  const LayerRun run = run_layer(make_layer(t, with_quant("f32")), x);
  // Softmax over all columns; the four best by score + bias; zero experts weigh the input itself.
  const auto logits = to_doubles(run.logits.view());
  const auto bias = to_doubles(t.correction_bias.view());
  const auto xs = to_doubles(x.view());
  std::vector<double> want = layer_oracle(t, x, run);
  bool any = false;
  for (std::size_t m = 0; m < 9; ++m) {
    std::vector<double> score(11);
    double sum = 0;
    for (std::size_t e = 0; e < 11; ++e) sum += score[e] = std::exp(logits[m * 11 + e]);
    std::vector<std::size_t> order(11);
    for (std::size_t e = 0; e < 11; ++e) {
      order[e] = e;
      score[e] /= sum;
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return score[a] + bias[a] > score[b] + bias[b];
    });
    for (std::size_t j = 0; j < 4; ++j) {
      if (order[j] < 8) continue;
      any = true;
      for (std::size_t h = 0; h < 64; ++h) {
        want[m * 64 + h] += score[order[j]] * xs[m * 64 + h];
      }
    }
  }
  EXPECT_TRUE(any) << "no token chose a zero expert: nothing is tested";
  const auto result = compare(to_doubles(run.output.view()), want);
  EXPECT_LE(result.rel_l2, 2e-6) << result.describe;
}

TEST(FusedMoE, TransformsWrapTheRoutedExpertsOnly) {
  // Latent size 64 inside hidden size 96: keep the first 64 columns, and put them back.
  MoeLayerSpec spec = with_shared(false);
  const LayerTensors latent = make_tensors(17, spec);
  MoeLayerSpec outer = spec;
  outer.hidden_size = 96;
  LayerTensors t = make_tensors(18, outer);
  t.experts = test::collect(*make_stacked_source(latent.experts.view()), 8);
  FusedMoE::Options options = with_quant("f32");
  options.transform.hidden_size = 64;
  options.transform.input = [](ConstTensorView x, TensorView y) -> Status {
    for (std::int64_t r = 0; r < x.dim(0); ++r) {
      std::memcpy(y.data + r * 128, x.data + r * x.strides[0] * 2, 128);
    }
    return {};
  };
  options.transform.output = [](ConstTensorView y, TensorView out) -> Status {
    for (std::int64_t r = 0; r < y.dim(0); ++r) {
      for (std::int64_t h = 0; h < 96; ++h) {
        out.as<float>()[r * 96 + h] = h < 64 ? 2.0F * y.as<float>()[r * 64 + h] : 0.0F;
      }
    }
    return {};
  };
  const Tensor x = random_hidden(19, 5, 96);
  const LayerRun run = run_layer(make_layer(t, options), x);
  // The shared expert saw all 96 columns, the routed ones 64.
  Tensor narrow = Tensor::zeros(DType::kBF16, {5, 64}).value();
  for (std::int64_t r = 0; r < 5; ++r) {
    std::copy_n(x.as<std::uint16_t>() + r * 96, 64, narrow.as<std::uint16_t>() + r * 64);
  }
  LayerTensors routed_only = make_tensors(17, small_spec());
  routed_only.experts = test::collect(*make_stacked_source(latent.experts.view()), 8);
  const auto routed = layer_oracle(routed_only, narrow, run);
  LayerTensors shared_only = make_tensors(18, outer);
  LayerRun nothing;
  nothing.topk_ids = Tensor::zeros(DType::kI32, {5, 2}).value();
  for (int i = 0; i < 10; ++i) nothing.topk_ids.as<std::int32_t>()[i] = -1;
  nothing.topk_weights = Tensor::zeros(DType::kF32, {5, 2}).value();
  auto want = layer_oracle(shared_only, x, nothing);
  for (std::size_t r = 0; r < 5; ++r) {
    for (std::size_t h = 0; h < 64; ++h) want[r * 96 + h] += 2.0 * routed[r * 64 + h];
  }
  const auto result = compare(to_doubles(run.output.view()), want);
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
}

TEST(FusedMoE, ASharedExpertMayHaveAnActivationOfItsOwn) {
  MoeLayerSpec spec = with_shared(false);
  ActivationParams params;
  params.limit = 0.5F;
  spec.activation = make_activation("swiglustep", params).value();
  params.limit = 0.125F;
  for (const ActivationSpec& own :
       {ActivationSpec{}, make_activation("swiglustep", params).value()}) {
    spec.shared.activation = own;
    const LayerTensors t = make_tensors(31, spec);
    const Tensor x = random_hidden(32, 9, 64);
    const LayerRun run = run_layer(make_layer(t, with_quant("f32")), x);
    const auto result = compare(to_doubles(run.output.view()), layer_oracle(t, x, run));
    EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
  }
}

TEST(FusedMoE, CustomRoutingIsAsked) {
  MoeLayerSpec spec = small_spec();
  spec.routing.method = RoutingMethod::kCustom;
  const LayerTensors t = make_tensors(20, spec);
  FusedMoE::Options options = with_quant("f32");
  options.custom_routing = [](ConstTensorView, ConstTensorView logits, bool, TensorView weights,
                              TensorView ids) -> Status {
    for (std::int64_t r = 0; r < logits.dim(0); ++r) {
      for (int j = 0; j < 2; ++j) {
        ids.as<std::int32_t>()[2 * r + j] = 3 + j;
        weights.as<float>()[2 * r + j] = 0.5F + static_cast<float>(j);
      }
    }
    return {};
  };
  const Tensor x = random_hidden(21, 4, 64);
  const LayerRun run = run_layer(make_layer(t, options), x);
  EXPECT_EQ(run.topk_ids.as<std::int32_t>()[5], 4);
  EXPECT_EQ(run.topk_weights.as<float>()[5], 1.5F);
  const auto result = compare(to_doubles(run.output.view()), layer_oracle(t, x, run));
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
}

TEST(FusedMoE, QuantisesAndRoundsAtLoad) {
  MoeLayerSpec spec = with_shared(false);
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  const LayerTensors t = make_tensors(22, spec);
  const Tensor x = random_hidden(23, 16, 256);
  for (const char* quant : {"f16", "fp8-bf16", "fp8-block"}) {
    const FusedMoE layer = make_layer(t, with_quant(quant));
    EXPECT_EQ(layer.quant().name, quant);
    const LayerRun run = run_layer(layer, x);
    const auto result = compare(to_doubles(run.output.view()), layer_oracle(t, x, run));
    EXPECT_LE(result.rel_l2, layer.quant().output_bound) << quant << ": " << result.describe;
    // The weights did change: fp8 is not computed as bf16.
    if (std::string_view(quant) != "f16") {
      EXPECT_GE(result.rel_l2, 1e-2) << quant;
    }
  }
}

TEST(FusedMoE, ExplainListsEveryStageAndAgreesWithTheLayer) {
  const LayerTensors t = make_tensors(24, deepseek_like());
  FusedMoE::Options options = with_quant("bf16");
  const FusedMoE layer = make_layer(t, options);
  const auto rows = layer.explain();
  const LayerExplanation explained = explain_layer(t.spec, options).value();
  const std::vector<CandidateReport>& same = explained.candidates;
  ASSERT_EQ(rows.size(), same.size());
  EXPECT_EQ(explained.experts_backend, layer.experts_backend());
  EXPECT_EQ(explained.determinism, layer.determinism());
  for (const std::int64_t tokens : {1, 7, 512, 4096}) {
    options.max_tokens = tokens;
    EXPECT_EQ(explain_layer(t.spec, options)->workspace_bytes,
              make_layer(t, options).workspace_bytes())
        << tokens;
  }
  options = with_quant("bf16");
  std::vector<std::string> stages;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].stage, same[i].stage);
    EXPECT_EQ(rows[i].name, same[i].name);
    EXPECT_EQ(rows[i].accepted, rows[i].reason.empty()) << rows[i].name;
    if (stages.empty() || stages.back() != rows[i].stage) stages.push_back(rows[i].stage);
  }
  EXPECT_EQ(stages, (std::vector<std::string>{"gate", "router", "prepare_finalize", "experts",
                                              "shared_experts"}));
  const auto first = std::find_if(rows.begin(), rows.end(), [](const CandidateReport& r) {
    return r.stage == "experts" && r.accepted;
  });
  EXPECT_EQ(layer.experts_backend(), first->name);
  EXPECT_NE(layer.determinism().find(layer.experts_backend()), std::string::npos);
  // At least what the tensors hold: 8 experts and the gate.
  EXPECT_GE(layer.weight_bytes(), t.experts.w13.bytes() + t.experts.w2.bytes());
  EXPECT_GT(layer.workspace_bytes(), 0);
  options.backend = "cpu_reference";
  EXPECT_EQ(make_layer(t, options).experts_backend(), "cpu_reference");
}

}  // namespace
}  // namespace moesaic
