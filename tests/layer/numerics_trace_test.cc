// FusedMoE::Trace::numerics: rows of all chunks, parts of routed and shared experts, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "layer/layer_specs.h"
#include "moesaic/fused_moe.h"
#include "numerics/float_codec.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::LayerTensors;
using test::make_layer;
using test::make_tensors;
using test::random_hidden;

constexpr std::int64_t kRows = 40;

std::vector<RowNumerics> measure(const FusedMoE& layer, const Tensor& x) {
  std::vector<RowNumerics> rows(static_cast<std::size_t>(x.shape()[0]));
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  FusedMoE::Trace trace;
  trace.numerics = rows;
  const Status status = layer.forward(x.view(), y.view(), trace);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return rows;
}

TEST(NumericsTrace, EveryRowOfEveryChunkAndEveryPart) {
  for (const test::Feature& f : test::common_features()) {
    SCOPED_TRACE(f.name);
    const test::LayerTensors t = make_tensors(3, f.spec());
    FusedMoE::Options whole, split;
    split.max_tokens = 16;
    const Tensor x = random_hidden(4, kRows, t.spec.hidden_size);
    const auto rows = measure(make_layer(t, whole), x), parts = measure(make_layer(t, split), x);
    ASSERT_EQ(rows.size(), parts.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].size, parts[i].size) << i;
      EXPECT_EQ(rows[i].noise, parts[i].noise) << i;
      EXPECT_EQ(rows[i].flags, 0U) << i;
      EXPECT_GT(rows[i].size, 0) << i;
      EXPECT_GT(rows[i].noise, 0) << i;
    }
    if (t.spec.shared.intermediate_size == 0) continue;
    FusedMoE::Options alone;
    alone.include_shared = false;
    EXPECT_GT(summarize(rows).size, summarize(measure(make_layer(t, alone), x)).size)
        << "the shared expert is a part too";
  }
}

TEST(NumericsTrace, SizesAreThoseOfTheOutputsParts) {
  // One expert a token and nothing else: the part is the output.
  MoeLayerSpec spec = test::small_spec();
  spec.routing.top_k = 1;
  const test::LayerTensors t = make_tensors(5, spec);
  const FusedMoE layer = make_layer(t);
  const Tensor x = random_hidden(6, kRows, spec.hidden_size);
  const auto rows = measure(layer, x);
  const auto y = test::to_doubles(test::run_layer(layer, x).output.view());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    double size = 0;
    for (std::int64_t h = 0; h < spec.hidden_size; ++h) {
      const double v =
          y[i * static_cast<std::size_t>(spec.hidden_size) + static_cast<std::size_t>(h)];
      size += v * v;
    }
    EXPECT_NEAR(std::sqrt(rows[i].size), std::sqrt(size), 1e-5 * std::sqrt(size));
  }
}

TEST(NumericsTrace, NothingIsAddedIntoRowsOfPadding) {
  MoeLayerSpec spec = test::small_spec();
  spec.shared.intermediate_size = 64;
  const test::LayerTensors t = make_tensors(3, spec);
  Tensor x = random_hidden(4, kRows, spec.hidden_size);
  x.as<std::uint16_t>()[7 * spec.hidden_size + 3] = 0x7FC0;  // NaN
  std::vector<std::uint8_t> mask(kRows, 0);
  mask[7] = mask[9] = 1;
  std::vector<RowNumerics> rows(kRows);
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.output = y.view();
  args.padding_mask = {reinterpret_cast<const std::byte*>(mask.data()), DType::kU8, {kRows}};
  args.trace.numerics = rows;
  ASSERT_TRUE(make_layer(t).forward(args).ok());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].size == 0 && rows[i].noise == 0, mask[i] != 0) << i;
    EXPECT_EQ(rows[i].flags, 0U) << i;
  }
}

TEST(NumericsTrace, ANaNIsItsRowsOwn) {
  const test::LayerTensors t = make_tensors(3, test::small_spec());
  Tensor x = random_hidden(4, kRows, t.spec.hidden_size);
  x.as<std::uint16_t>()[7 * t.spec.hidden_size + 3] = 0x7FC0;
  const auto rows = measure(make_layer(t), x);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ((rows[i].flags & kRowNotFinite) != 0, i == 7) << i;
  }
  EXPECT_EQ(summarize(rows).not_finite, 1);
}

// BF16 tensors of small_spec, of which one number is not one.
constexpr std::uint16_t kNaN = 0x7FC0, kInfinity = 0x7F80;
void spoil(Tensor& t, std::int64_t at, std::uint16_t by = kNaN) { t.as<std::uint16_t>()[at] = by; }

TEST(NumericsTrace, WhatIsNotFiniteInWeightsIsSaidAndLeavesOtherRowsTheirEstimate) {
  const Tensor x = random_hidden(4, kRows, test::small_spec().hidden_size);
  const LayerTensors clean = make_tensors(3, test::with_shared(true));
  const double estimate = summarize(measure(make_layer(clean), x)).error_estimate();
  struct Case {
    const char* name;
    void (*change)(LayerTensors& t);
    bool every_row;
  };
  for (const Case& c :
       {Case{"w2 of one expert", [](LayerTensors& t) { spoil(t.experts.w2, 7); }, false},
        Case{"gate", [](LayerTensors& t) { spoil(t.gate_weight, 5); }, true},
        Case{"infinity in the gate", [](LayerTensors& t) { spoil(t.gate_weight, 5, kInfinity); },
             false},
        Case{"w2 of the shared expert", [](LayerTensors& t) { spoil(t.shared.w2, 7); }, true},
        Case{"shared gate", [](LayerTensors& t) { spoil(t.shared_gate_weight, 7); }, true}}) {
    SCOPED_TRACE(c.name);
    LayerTensors t = make_tensors(3, test::with_shared(true));
    c.change(t);
    const FusedMoE layer = make_layer(t);
    const NumericsSummary sum = summarize(measure(layer, x));
    EXPECT_GT(sum.not_finite, 0);
    EXPECT_EQ(sum.not_finite == kRows, c.every_row);
    EXPECT_TRUE(std::isfinite(sum.size) && std::isfinite(sum.noise));
    if (!c.every_row) {
      EXPECT_NEAR(sum.error_estimate(), estimate, 0.3 * estimate);
    }
    EXPECT_TRUE(std::isinf(computed_bound(6e-3, 6e-3, sum)));
  }
}

TEST(NumericsTrace, AnOutputThatItsDtypeDoesNotHoldIsSaid) {
  const LayerTensors t = make_tensors(3, test::small_spec());
  const FusedMoE layer = make_layer(t);
  const Tensor x = random_hidden(4, kRows, t.spec.hidden_size);
  const test::LayerRun run = test::run_layer(layer, x);
  Tensor weights = Tensor::zeros(DType::kF32, run.topk_weights.shape()).value();
  std::vector<RowNumerics> rows(kRows);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.topk_ids = run.topk_ids.view();
  args.topk_weights = weights.view();
  args.trace.numerics = rows;
  weights.as<float>()[2 * 7] = 1e6F;  // row 7 is beyond 65504
  Tensor y;
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    y = Tensor::zeros(dtype, x.shape()).value();
    args.output = y.view();
    ASSERT_TRUE(layer.forward(args).ok());
    EXPECT_EQ(summarize(rows).not_finite, dtype == DType::kF16 ? 1 : 0);
    EXPECT_EQ((rows[7].flags & kRowNotFinite) != 0, dtype == DType::kF16);
  }
  weights.as<float>()[2 * 7] = INFINITY;
  ASSERT_TRUE(layer.forward(args).ok());
  EXPECT_EQ(summarize(rows).not_finite, 1);
  EXPECT_TRUE(std::isinf(summarize(rows).error_estimate())) << "all other weights are 0";
}

TEST(NumericsTrace, Refusals) {
  const test::LayerTensors t = make_tensors(3, test::small_spec());
  const Tensor x = random_hidden(4, kRows, t.spec.hidden_size);
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  std::vector<RowNumerics> rows(kRows - 1);
  FusedMoE::Trace trace;
  trace.numerics = rows;
  const Status size = make_layer(t).forward(x.view(), y.view(), trace);
  EXPECT_EQ(size.code(), StatusCode::kInvalidShape);
  EXPECT_NE(size.message().find("trace.numerics: got [39], need [40]"), std::string::npos)
      << size.message();
  FusedMoE::Options transformed;
  transformed.transform.hidden_size = t.spec.hidden_size;
  transformed.transform.input = [](ConstTensorView, TensorView) { return Status(); };
  transformed.transform.output = [](ConstTensorView, TensorView) { return Status(); };
  rows.resize(kRows);
  trace.numerics = rows;
  const Status transform = make_layer(t, transformed).forward(x.view(), y.view(), trace);
  EXPECT_EQ(transform.code(), StatusCode::kUnsupported);
  EXPECT_NE(transform.message().find("output transform"), std::string::npos) << transform.message();
}

}  // namespace
}  // namespace moesaic
