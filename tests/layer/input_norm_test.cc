// Layers with an input norm: the router and the routed experts see normalised rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "layer/layer_case.h"
#include "moesaic/fused_moe.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::random_hidden;
using test::run_layer;
using test::same_bits;
using test::small_spec;
using test::to_doubles;

FusedMoE::Options quant_of_normed_layer(std::string quant) {
  FusedMoE::Options options;
  options.quant = std::move(quant);
  options.num_threads = 1;
  return options;
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
    const FusedMoE layer = make_layer(t, quant_of_normed_layer("f32"));
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
  const LayerRun run = run_layer(make_layer(t, quant_of_normed_layer("f32")), x);
  LayerTensors wide = make_tensors(35, gemma4_like());
  wide.spec.input_norm_eps *= 64;
  Tensor scaled = random_hidden(36, 9, 64, DType::kF32);
  for (int i = 0; i < 9 * 64; ++i) scaled.as<float>()[i] *= 8;
  const LayerRun same = run_layer(make_layer(wide, quant_of_normed_layer("f32")), scaled);
  std::string where;
  EXPECT_TRUE(same_bits(run.output.view(), same.output.view(), &where)) << where;
  EXPECT_TRUE(same_bits(run.logits.view(), same.logits.view(), &where)) << where;

  std::vector<double> sum(9 * 64);
  for (int rank = 0; rank < 2; ++rank) {
    FusedMoE::Options options = quant_of_normed_layer("f32");
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

}  // namespace
}  // namespace moesaic
