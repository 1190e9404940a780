// Identity experts: what a row that chose them does not depend on, and rows that lie apart.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "layer/layer_case.h"
#include "layer/layer_specs.h"
#include "moesaic/device.h"
#include "numerics/element.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::LayerRun;
using test::LayerTensors;
using test::random_hidden;
using test::same_bits;

MoeLayerSpec with_identity_experts() {
  MoeLayerSpec spec = test::small_spec();
  spec.routing.method = RoutingMethod::kZeroExpert;
  spec.routing.num_zero_experts = 4;
  spec.routing.has_correction_bias = true;
  return spec;
}

// Expert 0 is infinite wherever it is computed, and nobody chooses it.
LayerTensors with_an_infinite_expert_0() {
  LayerTensors t = test::make_tensors(3, with_identity_experts());
  t.correction_bias.as<float>()[0] = -100;
  const Tensor& w2 = t.experts.w2;
  for (std::int64_t i = 0; i < w2.shape()[1] * w2.shape()[2]; ++i) {
    store_from_f32(t.experts.w2.data(), w2.dtype(), i, 3e38F);
  }
  return t;
}

void expect_finite_rows(const FusedMoE::Options& options) {
  const LayerTensors t = with_an_infinite_expert_0();
  const std::int64_t k = t.spec.routing.top_k, columns = t.spec.hidden_size;
  const FusedMoE layer = test::make_layer(t, options);
  for (const std::int64_t rows : {1, 5, 70}) {
    const LayerRun run = test::run_layer(layer, random_hidden(5, rows, columns));
    std::int64_t identities = 0, not_finite = 0;
    for (std::int64_t i = 0; i < rows * k; ++i) {
      // Reported as expert 0 with weight 0.
      const bool identity = run.topk_ids.as<std::int32_t>()[i] == 0;
      identities += identity ? 1 : 0;
      if (identity) {
        EXPECT_EQ(run.topk_weights.as<float>()[i], 0);
      }
    }
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      not_finite += std::isfinite(run.output.as<float>()[i]) ? 0 : 1;
    }
    EXPECT_EQ(not_finite, 0) << rows << " rows";
    EXPECT_TRUE(rows < 70 || identities > 0) << "no token chose an identity expert";
  }
}

TEST(ZeroExperts, ARowDoesNotDependOnAnExpertItDidNotChoose) { expect_finite_rows({}); }

TEST(ZeroExperts, NorDoesItOnAGpu) {
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason;
  expect_finite_rows(test::on_gpu());
  FusedMoE::Options general = test::on_gpu();
  general.quant = "f32";
  expect_finite_rows(general);
}

// As a view of the front columns of wider rows is.
TEST(ZeroExperts, RowsMayBeApart) {
  const LayerTensors t = test::make_tensors(4, with_identity_experts());
  const std::int64_t columns = t.spec.hidden_size, apart = columns + 24, rows = 9;
  const FusedMoE layer = test::make_layer(t);
  const Tensor x = random_hidden(6, rows, columns);
  Tensor wide = Tensor::zeros(x.dtype(), {rows, apart}).value();
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    store_from_f32(wide.data(), x.dtype(), i / columns * apart + i % columns,
                   load_as_f32(x.data(), x.dtype(), i));
  }
  FusedMoE::Args args;
  args.hidden_states = ConstTensorView(wide.data(), x.dtype(), {rows, columns});
  args.hidden_states.strides = {apart, 1};
  const auto got = test::run_args(layer, args);
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  std::string why;
  EXPECT_TRUE(same_bits(got->output.view(), test::run_layer(layer, x).output.view(), &why)) << why;
}

}  // namespace
}  // namespace moesaic
