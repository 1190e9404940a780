// Plain weights quantised while they are loaded: every scheme, against float64 on the unquantised
// weights.
#include <gtest/gtest.h>

#include <cmath>

#include "layer/layer_case.h"
#include "layer/load_sources.h"
#include "quant/quantize_weight.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic::test {
namespace {

MoeLayerSpec wide_spec(const char* stored) {
  MoeLayerSpec spec = small_spec();
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  spec.num_experts = spec.routing.num_experts = 4;
  spec.quant = quant_scheme_from_name(stored).value();
  return spec;
}

FusedMoE::Options with_quant(std::string_view quant) {
  FusedMoE::Options options;
  options.quant = std::string(quant);
  return options;
}

TEST(QuantiseAtLoad, EverySchemeIsWithinItsBoundAndDoesRoundTheWeights) {
  for (const char* stored : {"bf16", "f32"}) {
    const LayerTensors t = make_tensors(31, wide_spec(stored));
    const Tensor x = random_hidden(32, 6, 256);
    for (const Scheme& scheme : quant_schemes()) {
      SCOPED_TRACE(std::string(stored) + " as " + std::string(scheme.name));
      const FusedMoE layer = make_layer(t, with_quant(scheme.name));
      EXPECT_EQ(layer.quant().name, scheme.name);
      const LayerRun run = run_layer(layer, x);
      const auto result = compare(to_doubles(run.output.view()), layer_oracle(t, x, run));
      EXPECT_LE(result.rel_l2, layer.quant().output_bound) << result.describe;
      if (scheme.weight.granularity == ScaleGranularity::kNone) continue;
      // A format that changes nothing would be within every bound.
      EXPECT_GE(result.rel_l2, quant::rounding_error(scheme.weight)) << result.describe;
    }
  }
}

// The guess must hold for small and for large intermediates, and for layers with biases and without
// a gate.
TEST(QuantiseAtLoad, InputScalesWithoutCalibrationFollowTheWeights) {
  for (const double factor : {0x1p-6, 1.0, 0x1p6}) {
    LayerTensors t = make_tensors(33, wide_spec("f32"));
    for (OwnedExpertWeights* w : {&t.experts, &t.shared}) {
      for (std::int64_t i = 0; i < w->w13.bytes() / 4; ++i) {
        w->w13.as<float>()[i] *= static_cast<float>(factor);
      }
    }
    const Tensor x = random_hidden(34, 6, 256);
    const FusedMoE layer = make_layer(t, with_quant("nvfp4"));
    const LayerRun run = run_layer(layer, x);
    const auto result = compare(to_doubles(run.output.view()), layer_oracle(t, x, run));
    EXPECT_LE(result.rel_l2, layer.quant().output_bound) << factor << ": " << result.describe;
  }
}

// Scaling every weight by a power of two scales codes' scales, not codes; the guess follows.
TEST(QuantiseAtLoad, InputScalesArePowersOfTwoThatMoveWithTheWeights) {
  const LayerTensors t = make_tensors(35, wide_spec("f32"));
  const auto plan = layer::plan_quant(t.spec.quant, DType::kBF16, "nvfp4").value();
  float previous = 0;
  for (const float factor : {1.0F, 4.0F}) {
    OwnedExpertWeights w = collect(*t.weights().experts, 1);
    for (std::int64_t i = 0; i < w.w13.bytes() / 4; ++i) w.w13.as<float>()[i] *= factor;
    const auto stacked = make_stacked_source(w.view());
    const auto converting = layer::make_converting_source(*stacked, plan).value();
    const ExpertWeightsView v = converting->expert(0).value();
    EXPECT_EQ(*v.w13_input_scale.as<float>(), 0.25F);
    const float scale = *v.w2_input_scale.as<float>();
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5F) << scale;
    if (previous > 0) {
      EXPECT_EQ(scale, previous * 16) << "gate times up";
    }
    previous = scale;
  }
}

// A checkpoint with F32 scales run with powers of two, and the reverse: the bits of a checkpoint
// that says so.
TEST(ActivationScales, AnOptionSetsTheirFormatWhateverTheCheckpointSays) {
  LayerTensors t = make_tensors(38, wide_spec("fp8-block"));
  const Tensor x = random_hidden(39, 6, 256);
  FusedMoE::Options powers, floats;
  powers.activation_scales = ScaleFormat::kE8M0;
  floats.activation_scales = ScaleFormat::kF32;
  const auto output = [&](const FusedMoE::Options& options) {
    return run_layer(make_layer(t, options), x).output;
  };
  const auto text = [&](const FusedMoE::Options& options) {
    return explain_layer(t.spec, options).value().activations;
  };
  const Tensor as_floats = output({}), as_powers = output(powers);
  EXPECT_EQ(text({}), "F8_E4M3, an F32 scale per 128 columns");
  EXPECT_EQ(text(powers), "F8_E4M3, a power of two per 128 columns");
  std::string why;
  EXPECT_FALSE(same_bits(as_powers.view(), as_floats.view(), &why));
  EXPECT_TRUE(same_bits(output(floats).view(), as_floats.view(), &why)) << why;

  t.spec.quant = with_activation_scales(t.spec.quant, ScaleFormat::kE8M0).value();
  EXPECT_TRUE(same_bits(output({}).view(), as_powers.view(), &why)) << why;
  EXPECT_TRUE(same_bits(output(floats).view(), as_floats.view(), &why)) << why;
  EXPECT_EQ(make_layer(t, floats).quant().activation.scale_format, ScaleFormat::kF32);

  for (const char* quant : {"bf16", "fp8-bf16", "f32"}) {
    FusedMoE::Options none = powers;
    none.quant = quant;
    const LayerTensors plain = make_tensors(40, wide_spec("bf16"));
    expect_refusal(FusedMoE::create(plain.weights(), none).status(), StatusCode::kUnsupported,
                   {"activation_scales", quant});
  }
}

TEST(QuantiseAtLoad, RefusesWhatNoFormatHoldsNamingExpertAndMatrix) {
  LayerTensors t = make_tensors(36, wide_spec("f32"));
  const std::int64_t per_expert = t.experts.w2.bytes() / 4 / t.spec.num_experts;
  t.experts.w2.as<float>()[3 * per_expert] = std::nanf("");
  for (const char* quant : {"mxfp4", "int4-g128", "fp8-block"}) {
    const auto layer = FusedMoE::create(t.weights(), with_quant(quant));
    ASSERT_FALSE(layer.ok()) << quant;
    EXPECT_EQ(layer.status().code(), StatusCode::kInvalidArgument) << quant;
    const std::string& text = layer.status().message();
    EXPECT_NE(text.find("expert 3: w2"), std::string::npos) << text;
  }
  // F16 has too few bits for small weights; a few of them are no part of their matrix.
  LayerTensors small = make_tensors(36, wide_spec("f32"));
  const auto scale_w2 = [&](std::int64_t stride, float factor) {
    for (std::int64_t i = 3 * per_expert; i < 4 * per_expert; i += stride) {
      small.experts.w2.as<float>()[i] *= factor;
    }
  };
  scale_w2(64, 1e-4F);
  EXPECT_TRUE(FusedMoE::create(small.weights(), with_quant("f16")).ok());
  scale_w2(1, 1e-4F);
  expect_refusal(FusedMoE::create(small.weights(), with_quant("f16")).status(),
                 StatusCode::kUnsupported,
                 {"expert 3: w2", "relative error of", "need at most 2.4e-04", "--quant f32"});
  for (const char* quant : {"bf16", "fp8-channel", "fp8-block", "int4-fp8"}) {
    EXPECT_TRUE(FusedMoE::create(small.weights(), with_quant(quant)).ok()) << quant;
  }
  // Sizes are refused before anything is read.
  MoeLayerSpec narrow = small_spec();
  narrow.hidden_size = 48;
  const auto layer = FusedMoE::create(make_tensors(37, narrow).weights(), with_quant("mxfp4"));
  EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported) << layer.status().to_string();
  EXPECT_NE(layer.status().message().find("hidden_size: got 48"), std::string::npos);
}

}  // namespace
}  // namespace moesaic::test
