// Options that round the gate's logits before the router: what the router then sees and chooses.
#include <gtest/gtest.h>

#include <cstring>

#include "gate/rounding.h"
#include "layer/near_ties.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::LayerRun;
using test::LayerTensors;
using test::make_layer;
using test::near_ties;
using test::random_hidden;
using test::rounded_logits;
using test::run_layer;
using test::same_bits;

// What a router of the same description makes of the logits that a call reports.
void expect_the_routers_choice(const LayerTensors& t, const LayerRun& run) {
  Router::Options options;
  options.spec = t.spec.routing;
  options.correction_bias = t.correction_bias.view();
  const Router router = Router::create(options).value();
  const Shape slots = run.topk_ids.shape();
  Tensor weights = Tensor::zeros(DType::kF32, slots).value();
  Tensor ids = Tensor::zeros(DType::kI32, slots).value();
  Router::Args a;
  a.router_logits = run.logits.view();
  a.topk_weights = weights.view();
  a.topk_ids = ids.view();
  ASSERT_TRUE(router.select_experts(a).ok());
  std::string why;
  EXPECT_TRUE(same_bits(run.topk_ids.view(), ids.view(), &why)) << why;
  EXPECT_TRUE(same_bits(run.topk_weights.view(), weights.view(), &why)) << why;
}

int odd_ids(const LayerRun& run) {
  int odd = 0;
  for (std::int64_t i = 0; i < run.topk_ids.shape()[0]; ++i) {
    odd += run.topk_ids.as<std::int32_t>()[i] % 2;
  }
  return odd;
}

TEST(RouterLogits, AreRoundedAsTheOptionsSayAndChooseTheExperts) {
  for (const DType gate_dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const LayerTensors t = near_ties(gate_dtype);
    const Tensor x = random_hidden(62, 70, t.spec.hidden_size,
                                   gate_dtype == DType::kF16 ? DType::kF16 : DType::kBF16);
    FusedMoE::Options options;
    options.quant = "f32";
    options.max_tokens = 32;
    options.num_threads = 1;
    const LayerRun plain = run_layer(make_layer(t, options), x);
    EXPECT_GT(odd_ids(plain), 10) << "no near ties to turn around";
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool fp32 : {true, false}) {
        SCOPED_TRACE(std::string(dtype_name(gate_dtype)) + " to " + std::string(dtype_name(dtype)) +
                     (fp32 ? "" : ", linear of the weight's"));
        options.router_logits_dtype = dtype;
        options.gate_force_fp32_compute = fp32;
        const LayerRun run = run_layer(make_layer(t, options), x);
        const gate::LogitRounding rounding = {fp32 ? DType::kF32 : gate_dtype, dtype};
        std::string why;
        EXPECT_TRUE(
            same_bits(run.logits.view(), rounded_logits(plain.logits, rounding).view(), &why))
            << why;
        expect_the_routers_choice(t, run);
        EXPECT_EQ(odd_ids(run) == odd_ids(plain), rounding.none());
        const auto result =
            test::compare(test::to_doubles(run.output.view()), test::layer_oracle(t, x, run));
        EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
      }
    }
  }
}

TEST(RouterLogits, ExplainSaysWhatTheRouterSees) {
  const MoeLayerSpec spec = test::small_spec();
  const auto shown = [&](DType dtype, bool fp32, Device device = Device::cpu()) {
    FusedMoE::Options options;
    options.device = device;
    options.router_logits_dtype = dtype;
    options.gate_force_fp32_compute = fp32;
    return explain_layer(spec, options).value().router_logits;
  };
  EXPECT_EQ(shown(DType::kF32, true), "fp32 sums");
  EXPECT_EQ(shown(DType::kBF16, true), "fp32 sums rounded to BF16");
  EXPECT_EQ(shown(DType::kF32, false), "fp32 sums rounded to BF16");
  EXPECT_EQ(shown(DType::kBF16, false), "fp32 sums rounded to BF16");
  EXPECT_EQ(shown(DType::kF16, false), "fp32 sums rounded to BF16, then to F16");
  EXPECT_EQ(shown(DType::kBF16, true, Device::cuda(0)), "fp32 sums rounded to BF16");
}

TEST(RouterLogits, RefusesWithFieldValueAndNeed) {
  const LayerTensors t = near_ties(DType::kBF16);
  FusedMoE::Options options;
  options.router_logits_dtype = DType::kI32;
  expect_refusal(FusedMoE::create(t.weights(), options).status(), StatusCode::kInvalidDType,
                 {"router_logits_dtype: got I32"});
  options.include_gate = false;
  options.router_logits_dtype = DType::kBF16;
  expect_refusal(FusedMoE::create(t.weights(), options).status(), StatusCode::kInvalidArgument,
                 {"router_logits_dtype: got BF16", "include_gate"});
  options.router_logits_dtype = DType::kF32;
  options.gate_force_fp32_compute = false;
  expect_refusal(FusedMoE::create(t.weights(), options).status(), StatusCode::kInvalidArgument,
                 {"gate_force_fp32_compute: got false", "include_gate"});
  options.include_gate = true;
  const FusedMoE layer = make_layer(t, options);
  const Tensor x = random_hidden(63, 3, t.spec.hidden_size, DType::kF32);
  Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
  expect_refusal(layer.forward(x.view(), y.view()), StatusCode::kUnsupported,
                 {"hidden_states: got F32, need BF16", "force_fp32_compute"});
  // The gate does not see the rows of a call that brings its logits, and nobody rounds those.
  const Tensor logits = random_hidden(64, 3, 8, DType::kF32);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.router_logits = logits.view();
  args.output = y.view();
  Tensor seen = Tensor::zeros(DType::kF32, {3, 8}).value();
  args.trace.router_logits = seen.view();
  const Status given = layer.forward(args);
  EXPECT_TRUE(given.ok()) << given.to_string();
  std::string why;
  EXPECT_TRUE(same_bits(seen.view(), logits.view(), &why)) << why;
}

}  // namespace
}  // namespace moesaic
