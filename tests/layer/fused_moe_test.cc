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
using test::expect_refusal;
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

// The router and the routed experts of a layer with an input norm: what they see, in float64.
std::vector<double> normalised(const std::vector<double>& x, std::size_t hidden, double eps) {
  std::vector<double> n = x;
  for (std::size_t row = 0; row * hidden < n.size(); ++row) {
    double squares = 0;
    for (std::size_t h = 0; h < hidden; ++h) squares += x[row * hidden + h] * x[row * hidden + h];
    const double root = std::sqrt(squares / static_cast<double>(hidden) + eps);
    for (std::size_t h = 0; h < hidden; ++h) n[row * hidden + h] /= root;
  }
  return n;
}

MoeLayerSpec gemma4_like() {
  MoeLayerSpec spec = small_spec();
  spec.activation.kind = ActivationKind::kGeluTanh;
  spec.routing.has_expert_scale = true;
  spec.input_norm_eps = 0.25;
  return spec;
}

TEST(FusedMoE, AnInputNormIsSeenByRouterAndRoutedExperts) {
  MoeLayerSpec spec = gemma4_like();
  spec.shared.intermediate_size = 48;  // sees the rows as they are
  const LayerTensors t = make_tensors(33, spec);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor x = random_hidden(34, 9, 64, dtype);
    const FusedMoE layer = make_layer(t, with_quant("f32"));
    const LayerRun run = run_layer(layer, x);
    const std::vector<double> n = normalised(to_doubles(x.view()), 64, spec.input_norm_eps);
    const std::vector<double> gate = to_doubles(t.gate_weight.view());
    std::vector<double> logits(9 * 8);
    for (std::size_t row = 0; row < 9; ++row) {
      for (std::size_t e = 0; e < 8; ++e) {
        for (std::size_t h = 0; h < 64; ++h) {
          logits[row * 8 + e] += n[row * 64 + h] * gate[e * 64 + h];
        }
      }
    }
    const auto seen = compare(to_doubles(run.logits.view()), logits);
    EXPECT_LE(seen.rel_l2, 1e-6) << seen.describe;

    Tensor experts_see = Tensor::zeros(DType::kF32, {9, 64}).value();
    for (std::size_t i = 0; i < n.size(); ++i) {
      experts_see.as<float>()[i] =
          static_cast<float>(n[i] * static_cast<double>(t.experts_norm_weight.as<float>()[i % 64]));
    }
    LayerTensors routed_only = make_tensors(33, spec);
    routed_only.spec.shared = {};
    std::vector<double> want = layer_oracle(routed_only, experts_see, run);
    LayerRun nothing;
    nothing.topk_ids = Tensor::zeros(DType::kI32, {9, 2}).value();
    for (int i = 0; i < 18; ++i) nothing.topk_ids.as<std::int32_t>()[i] = -1;
    nothing.topk_weights = Tensor::zeros(DType::kF32, {9, 2}).value();
    const std::vector<double> shared = layer_oracle(t, x, nothing);
    for (std::size_t i = 0; i < want.size(); ++i) want[i] += shared[i];
    const auto result = compare(to_doubles(run.output.view()), want);
    EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
  }
}

// Exact: rows times a power of two with eps times its square are the same normalised rows. And on
// two ranks the partial sums are those of one.
TEST(FusedMoE, AnInputNormForgetsTheScaleOfARow) {
  const LayerTensors t = make_tensors(35, gemma4_like());
  const Tensor x = random_hidden(36, 9, 64, DType::kF32);
  const LayerRun run = run_layer(make_layer(t, with_quant("f32")), x);
  LayerTensors wide = make_tensors(35, gemma4_like());
  wide.spec.input_norm_eps *= 64;
  Tensor scaled = random_hidden(36, 9, 64, DType::kF32);
  for (int i = 0; i < 9 * 64; ++i) scaled.as<float>()[i] *= 8;
  const LayerRun same = run_layer(make_layer(wide, with_quant("f32")), scaled);
  std::string where;
  EXPECT_TRUE(same_bits(run.output.view(), same.output.view(), &where)) << where;
  EXPECT_TRUE(same_bits(run.logits.view(), same.logits.view(), &where)) << where;

  std::vector<double> sum(9 * 64);
  for (int rank = 0; rank < 2; ++rank) {
    FusedMoE::Options options = with_quant("f32");
    options.parallel.tp_size = 2;
    options.parallel.tp_rank = rank;
    MoeLayerWeights weights = t.weights();
    const std::int64_t half = 16;
    const test::OwnedExpertWeights all = test::collect(*weights.experts, 8);
    Tensor w13 = Tensor::zeros(DType::kBF16, {8, 2 * half, 64}).value();
    Tensor w2 = Tensor::zeros(DType::kBF16, {8, 64, half}).value();
    for (std::int64_t e = 0; e < 8; ++e) {
      for (std::int64_t r = 0; r < 2 * half; ++r) {
        const std::int64_t from = (r / half) * 32 + rank * half + r % half;
        std::copy_n(all.w13.as<std::uint16_t>() + (e * 64 + from) * 64, 64,
                    w13.as<std::uint16_t>() + (e * 2 * half + r) * 64);
      }
      for (std::int64_t h = 0; h < 64; ++h) {
        std::copy_n(all.w2.as<std::uint16_t>() + (e * 64 + h) * 32 + rank * half, half,
                    w2.as<std::uint16_t>() + (e * 64 + h) * half);
      }
    }
    weights.experts = make_stacked_source({w13.view(), {}, {}, w2.view(), {}, {}});
    const FusedMoE part = FusedMoE::create(std::move(weights), options).value();
    const std::vector<double> y = to_doubles(run_layer(part, x).output.view());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += y[i];
  }
  const auto result = compare(to_doubles(run.output.view()), sum);
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
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

void expect_refused(const Status& status, StatusCode code, std::string_view words) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
}

TEST(FusedMoE, CreateRefusesWithStageFieldAndNeed) {
  using Spoil = std::function<void(MoeLayerWeights&, FusedMoE::Options&)>;
  const LayerTensors t = make_tensors(25, deepseek_like());
  const auto refuse = [&](const Spoil& spoil, StatusCode code, std::string_view words) {
    MoeLayerWeights weights = t.weights();
    FusedMoE::Options options;
    spoil(weights, options);
    const auto layer = FusedMoE::create(std::move(weights), options);
    ASSERT_FALSE(layer.ok()) << words;
    expect_refused(layer.status(), code, words);
  };
  refuse([](auto&, auto& o) { o.max_tokens = 0; }, StatusCode::kInvalidArgument,
         "max_tokens: got 0");
  refuse([](auto&, auto& o) { o.num_threads = -1; }, StatusCode::kInvalidArgument, "num_threads");
  refuse([](auto&, auto& o) { o.quant = "mxfp5"; }, StatusCode::kNotFound, "mxfp4");
  refuse([](auto&, auto& o) { o.backend = "cuda_sm90"; }, StatusCode::kUnsupported,
         "experts backend cuda_sm90: device: cpu, need a Hopper GPU");
  refuse([](auto&, auto& o) { o.quant = "int4-fp8"; }, StatusCode::kUnsupported,
         "experts: hidden_size: got 64");
  refuse([](auto& w, auto&) { w.experts = nullptr; }, StatusCode::kInvalidArgument,
         "experts: got no source");
  refuse([](auto& w, auto&) { w.tensors.gate_weight = Tensor(); }, StatusCode::kInvalidArgument,
         "gate_weight: got none");
  refuse([](auto& w, auto&) { w.tensors.gate_weight = random_hidden(1, 8, 32); },
         StatusCode::kInvalidShape, "gate_weight: got [8, 32], need [8, 64]");
  refuse([](auto& w, auto&) { w.tensors.e_score_correction_bias = Tensor(); },
         StatusCode::kInvalidArgument, "e_score_correction_bias: got none");
  refuse([](auto& w, auto&) { w.tensors.gate_bias = random_hidden(1, 1, 8); },
         StatusCode::kInvalidArgument, "gate_bias");
  refuse([](auto& w, auto&) { w.shared = nullptr; }, StatusCode::kInvalidArgument,
         "shared: got no source");
  refuse([](auto& w, auto&) { w.spec.routing.top_k = 9; }, StatusCode::kInvalidArgument, "top_k");
  refuse([](auto& w, auto&) { w.spec.intermediate_size = 33; }, StatusCode::kInvalidShape,
         "experts: expert 0: w13");
  refuse([](auto&, auto& o) { o.parallel.tp_size = 3; }, StatusCode::kInvalidArgument,
         "intermediate_size: got 32 with tp_size 3, need a multiple of tp_size");
  refuse([](auto&, auto& o) { o.parallel.ep_rank = 5; }, StatusCode::kInvalidArgument, "ep_rank");
  refuse([](auto&, auto& o) { o.transform.hidden_size = 32; }, StatusCode::kInvalidArgument,
         "transform.input");
  refuse(
      [](auto&, auto& o) {
        o.transform.hidden_size = 32;
        o.transform.input = [](ConstTensorView, TensorView) { return Status(); };
      },
      StatusCode::kInvalidArgument, "transform.hidden_size: got 32, need hidden_size 64");
  refuse(
      [](auto& w, auto&) {
        w.spec.routing = RoutingSpec();
        w.spec.routing.num_experts = 8;
        w.spec.routing.top_k = 2;
        w.spec.routing.method = RoutingMethod::kSimulated;
        w.tensors.e_score_correction_bias = Tensor();
      },
      StatusCode::kUnsupported, "routing.method: got simulated");
  refuse([](auto& w, auto&) { w.spec.input_norm_eps = 1e-6; }, StatusCode::kInvalidArgument,
         "experts_norm_weight: got none");
  refuse([](auto& w, auto&) { w.spec.input_norm_eps = -1; }, StatusCode::kInvalidArgument,
         "input_norm_eps: got -1");
  refuse([](auto& w, auto&) { w.tensors.expert_scale = random_hidden(1, 1, 8); },
         StatusCode::kInvalidArgument, "expert_scale");
  refuse(
      [](auto& w, auto& o) {
        w.spec.input_norm_eps = 1e-6;
        o.transform.hidden_size = 64;
        o.transform.input = [](ConstTensorView, TensorView) { return Status(); };
      },
      StatusCode::kUnsupported, "routed transforms: got one with input_norm_eps");
}

TEST(FusedMoE, ForwardRefusesWithFieldValueAndNeed) {
  const LayerTensors t = make_tensors(26, small_spec());
  const FusedMoE layer = make_layer(t);
  const Tensor x = random_hidden(27, 3, 64);
  Tensor out = Tensor::zeros(DType::kF32, {3, 64}).value();
  expect_refused(layer.forward(ConstTensorView(x.data(), DType::kBF16, {6, 32}), out.view()),
                 StatusCode::kInvalidShape, "hidden_states: got [6, 32], need [M, 64]");
  expect_refused(layer.forward(ConstTensorView(x.data(), DType::kI16, {3, 64}), out.view()),
                 StatusCode::kInvalidDType, "hidden_states: got I16");
  expect_refused(layer.forward(x.view(), TensorView(out.data(), DType::kF32, {2, 64})),
                 StatusCode::kInvalidShape, "output: got [2, 64], need [3, 64]");
  expect_refused(layer.forward(x.view(), TensorView(out.data(), DType::kI32, {3, 64})),
                 StatusCode::kInvalidDType, "output: got I32");
  expect_refused(layer.forward(ConstTensorView(out.data(), DType::kBF16, {3, 64}), out.view()),
                 StatusCode::kAliasing, "output overlaps hidden_states");
  expect_refused(layer.forward(ConstTensorView(nullptr, DType::kBF16, {3, 64}), out.view()),
                 StatusCode::kInvalidArgument, "null");
  Tensor ids = Tensor::zeros(DType::kI32, {3, 3}).value();
  FusedMoE::Trace trace;
  trace.topk_ids = ids.view();
  expect_refused(layer.forward(x.view(), out.view(), trace), StatusCode::kInvalidShape,
                 "trace.topk_ids: got [3, 3], need [3, 2]");
}

TEST(FusedMoe, ViewsOfAnotherDeviceAreRefused) {
  const LayerTensors t = make_tensors(31, small_spec());
  const FusedMoE layer = make_layer(t);
  const Tensor x = random_hidden(32, 2, t.spec.hidden_size);
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  const Device gpu = Device::cuda(0);
  const ConstTensorView there(x.data(), x.dtype(), x.shape(), gpu);
  expect_refusal(layer.forward(there, y.view()), StatusCode::kInvalidArgument,
                 {"hidden_states: got memory of cuda:0, need memory of cpu"});
  expect_refusal(layer.forward(x.view(), {y.data(), DType::kF32, y.shape(), gpu}),
                 StatusCode::kInvalidArgument, {"output: got memory of cuda:0"});
  Tensor logits =
      Tensor::zeros(DType::kF32, {2, t.spec.routing.num_experts + t.spec.routing.num_zero_experts})
          .value();
  FusedMoE::Trace trace;
  trace.router_logits = {logits.data(), DType::kF32, logits.shape(), gpu};
  expect_refusal(layer.forward(x.view(), y.view(), trace), StatusCode::kInvalidArgument,
                 {"trace.router_logits: got memory of cuda:0"});
  EXPECT_TRUE(layer.forward(x.view(), y.view()).ok());
}

}  // namespace
}  // namespace moesaic
