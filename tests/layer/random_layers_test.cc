// Random layers: every combination of format, sizes, routing, activation, biases, shared experts,
// dtypes and options that a seed draws (support/random_cases.h) must do what the headers promise of all
// of them. A failure names its seed.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "layer/layer_case.h"
#include "layer/random_checks.h"
#include "layer/random_layer.h"
#include "moesaic/device.h"
#include "support/random_cases.h"

namespace moesaic {
namespace {

// False: the layer is refused, as not supported.
bool check(const test::RandomLayer& drawn) {
  const test::LayerTensors tensors = test::make_tensors(drawn.seed, drawn.spec);
  auto made = FusedMoE::create(tensors.weights(), drawn.options);
  if (!made.ok()) {
    EXPECT_EQ(made.status().code(), StatusCode::kUnsupported) << made.status().to_string();
    return false;
  }
  const FusedMoE layer = std::move(made).value();
  SCOPED_TRACE(layer.experts_backend());
  test::Rng rng(drawn.seed + 3);
  test::RandomRows rows;
  rows.hidden_states =
      test::random_hidden(drawn.seed + 5, drawn.tokens, drawn.spec.hidden_size, drawn.rows);
  if (drawn.spec.routing.method == RoutingMethod::kHash) {
    rows.tokens = Tensor::zeros(DType::kI32, {drawn.tokens}).value();
    for (std::int64_t i = 0; i < drawn.tokens; ++i) {
      rows.tokens.as<std::int32_t>()[i] =
          static_cast<std::int32_t>(rng.integer(0, drawn.spec.hash_vocabulary - 1));
    }
  }
  auto ran = test::run_args(layer, rows.args(), drawn.output);
  EXPECT_TRUE(ran.ok()) << ran.status().to_string();
  if (!ran.ok()) return true;
  const test::RandomCall call = {drawn, tensors, layer, rows, ran.value()};
  test::expect_within_bound(call);
  test::expect_rows_by_themselves(call, rng);
  test::expect_unmoved_by_neighbours(call, rng);
  test::expect_same_through_doors(call, rng);
  test::expect_padding_left_out(call, rng);
  test::expect_other_outputs(call);
  if (drawn.options.device.is_cuda()) {
    test::expect_as_on_the_cpu(call);
    test::expect_same_enqueued(call);
  }
  return true;
}

void check_seeds(Device device) {
  const test::Seeds seeds = test::seeds_of_run(24);
  std::uint64_t ran = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const test::RandomLayer drawn = test::draw_layer(seed, device);
    SCOPED_TRACE(drawn.describe());
    ran += check(drawn) ? 1U : 0U;
    if (testing::Test::HasFatalFailure()) return;
  }
  testing::Test::RecordProperty("layers", std::to_string(ran));
  EXPECT_GE(2 * ran, seeds.cases > 20 ? seeds.cases : 0) << "too many were refused";
}

TEST(RandomLayers, OnTheCpu) { check_seeds(Device::cpu()); }

TEST(RandomLayers, OnAGpu) {
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason;
  check_seeds(Device::cuda(0));
}

}  // namespace
}  // namespace moesaic
