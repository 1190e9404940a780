// The GPU router against the CPU's, by bits. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "router/router_fixture.h"
#include "router/sm90/router.h"
#include "support/cuda_device.h"
#include "support/random.h"
#include "support/refusal.h"
#include "support/special_values.h"

namespace moesaic {
namespace {

using cuda::CudaRouter;
using cuda::CudaRouterArgs;
using test::DeviceBytes;
using test::Rng;

using test::kInf;

struct Method {
  std::string name;
  Router::Options options;
  std::vector<float> bias, vision_bias, expert_scale;
  std::vector<std::int32_t> table;
  std::int64_t vocab = 0;

  std::int64_t columns() const { return options.spec.num_experts + options.spec.num_zero_experts; }
  // Views into this object's vectors.
  Router::Options bound() const {
    Router::Options o = options;
    const auto view = [](const auto& v, DType dtype, const Shape& shape) {
      return ConstTensorView(reinterpret_cast<const std::byte*>(v.data()), dtype, shape);
    };
    if (!bias.empty()) o.correction_bias = view(bias, DType::kF32, {columns()});
    if (!expert_scale.empty()) o.expert_scale = view(expert_scale, DType::kF32, {columns()});
    if (!vision_bias.empty()) o.vision_bias = view(vision_bias, DType::kF32, {columns()});
    if (!table.empty()) o.hash_table = view(table, DType::kI32, {vocab, o.spec.top_k});
    return o;
  }
};

std::vector<float> random_floats(Rng& rng, std::int64_t n, double sd) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(static_cast<float>(sd * rng.normal()));
  return v;
}

// Every method that the device takes, for E experts of which k are chosen.
std::vector<Method> methods(std::int64_t experts, std::int64_t k, std::int64_t groups) {
  Rng rng(5);
  std::vector<Method> all;
  for (const auto& [name, scoring, biased, renorm] : test::scoring_cases()) {
    for (const bool grouped : {false, true}) {
      if (grouped && groups == 1) continue;
      Method m;
      m.name = name + (grouped ? " grouped" : "");
      m.options.spec =
          grouped ? test::grouped_spec(scoring, experts, k, renorm, groups, (groups + 1) / 2)
                  : test::topk_spec(scoring, experts, k, renorm);
      m.options.spec.routed_scaling_factor = 2.5;
      m.options.spec.has_correction_bias = biased;
      if (biased) m.bias = random_floats(rng, experts, 0.3);
      all.push_back(std::move(m));
    }
  }
  const auto add = [&](std::string name, RoutingMethod method, std::int64_t top_k) -> Method& {
    Method m;
    m.name = std::move(name);
    m.options.spec = test::method_spec(method, experts, top_k);
    all.push_back(std::move(m));
    return all.back();
  };
  add("topk_softmax", RoutingMethod::kTopKSoftmax, k).options.spec.routed_scaling_factor = 1.5;
  add("llama4", RoutingMethod::kLlama4, 1);
  if (experts >= 2) add("sparse_mixer", RoutingMethod::kSparseMixer, 2);
  for (const double p : {1.0, 2.0, 0.7})
    add("p_norm", RoutingMethod::kPNorm, k).options.spec.p_norm = p;
  {
    Method& m = add("renorm_floor", RoutingMethod::kTopK, k);
    m.options.spec.renormalize = true;
    m.options.spec.renorm_floor = 0.9;
    m.options.num_fused_shared_experts = 2;
    m.options.shared_expert_weight = 0.5F;
  }
  {
    Method& m = add("renorm_epsilon", RoutingMethod::kTopK, k);
    m.options.spec.renormalize = true;
    m.options.spec.renorm_epsilon = 0.3;
  }
  {
    Method& m = add("expert scale", RoutingMethod::kTopK, k);
    m.options.spec.renormalize = true;
    m.options.spec.has_expert_scale = true;
    m.expert_scale = random_floats(rng, experts, 1.0);
  }
  if (groups > 1) {
    Method m;
    m.name = "groups by their best two";
    m.options.spec =
        test::grouped_spec(ScoringFunc::kSoftmax, experts, k, true, groups, (groups + 1) / 2);
    m.options.spec.group_by_best_two = true;
    all.push_back(std::move(m));
  }
  {
    Method& m = add("zero experts", RoutingMethod::kZeroExpert, k);
    m.options.spec.num_experts = experts - experts / 3;
    m.options.spec.num_zero_experts = experts / 3;
    m.options.spec.has_correction_bias = true;
    m.options.spec.routed_scaling_factor = 6;
    m.bias = random_floats(rng, experts, 0.1);
  }
  for (const auto func :
       {ScoringFunc::kSqrtSoftplus, ScoringFunc::kSigmoid, ScoringFunc::kSoftmax}) {
    Method& m = add("hash " + std::string(scoring_func_name(func)), RoutingMethod::kHash, k);
    m.options.spec.scoring_func = func;
    m.options.spec.renormalize = func != ScoringFunc::kSigmoid;
    m.vocab = 50;
    for (std::int64_t i = 0; i < m.vocab * k; ++i) {
      m.table.push_back(static_cast<std::int32_t>(rng.integer(0, experts - 1)));
    }
    m.options.vision_token_base = 100;
    m.vision_bias = random_floats(rng, experts, 0.3);
  }
  return all;
}

// Rows of every kind: ordinary, with ties, near-ties, NaN, infinities, nothing finite, signed
// zeros.
std::vector<float> logits_of(std::int64_t tokens, std::int64_t columns) {
  Rng rng(9);
  std::vector<float> l;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < columns; ++e) {
      const auto x = static_cast<float>(2 * rng.normal());
      const bool here = rng.integer(0, 7) == 0;
      switch (t % 10) {
        case 1:
          l.push_back(std::round(2 * x) / 2);
          break;
        case 2:
          l.push_back(1.0F + std::ldexp(static_cast<float>(rng.integer(-3, 3)), -23));
          break;
        case 3:
          l.push_back(here ? std::nanf("") : x);
          break;
        case 4:
          l.push_back(here ? -kInf : x);
          break;
        case 5:
          l.push_back(here ? kInf : x);
          break;
        case 6:
          l.push_back(t % 3 == 0 ? std::nanf("") : t % 3 == 1 ? -kInf : kInf);
          break;
        case 7:
          l.push_back(x > 0 ? 0.0F : -0.0F);
          break;
        case 8:
          l.push_back(40 * x);
          break;
        default:
          l.push_back(x);
      }
    }
  }
  return l;
}

struct Result {
  std::vector<float> weights, zero;
  std::vector<std::int32_t> ids;
};

Result run_cpu(const Method& m, const std::vector<float>& logits,
               const std::vector<std::int32_t>& input_ids,
               const std::vector<std::uint8_t>& padding) {
  const Router router = Router::create(m.bound()).value();
  const auto tokens = static_cast<std::int64_t>(padding.size());
  Result r;
  r.weights.resize(static_cast<std::size_t>(tokens * router.slots()));
  r.ids.resize(r.weights.size());
  r.zero.resize(padding.size());
  const std::vector<float> ones(padding.size(), 1.0F);
  const auto bytes = [](const void* p) { return static_cast<const std::byte*>(p); };
  const auto out = [](void* p) { return static_cast<std::byte*>(p); };
  Router::Args a;
  a.router_logits = {bytes(logits.data()), DType::kF32, {tokens, m.columns()}};
  a.padding_mask = {bytes(padding.data()), DType::kU8, {tokens}};
  if (!m.table.empty()) a.input_ids = {bytes(input_ids.data()), DType::kI32, {tokens}};
  a.topk_weights = {out(r.weights.data()), DType::kF32, {tokens, router.slots()}};
  a.topk_ids = {out(r.ids.data()), DType::kI32, {tokens, router.slots()}};
  if (m.options.spec.num_zero_experts > 0) {  // of hidden states of 1: the weight itself
    a.hidden_states = {bytes(ones.data()), DType::kF32, {tokens, 1}};
    a.zero_expert_output = {out(r.zero.data()), DType::kF32, {tokens, 1}};
  }
  const Status status = router.select_experts(a);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return r;
}

Result run_gpu(const Method& m, const std::vector<float>& logits,
               const std::vector<std::int32_t>& input_ids,
               const std::vector<std::uint8_t>& padding) {
  auto made = CudaRouter::create(m.bound(), 0);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  const auto tokens = static_cast<std::int64_t>(padding.size());
  const DeviceBytes l(logits), input(input_ids), mask(padding);
  const DeviceBytes weights(tokens * (*made)->slots() * 4), ids(tokens * (*made)->slots() * 4);
  const DeviceBytes zero(tokens * 4);
  CudaRouterArgs a;
  a.tokens = tokens;
  a.router_logits = l.as<float>();
  a.input_ids = input.as<std::int32_t>();
  a.padding_mask = mask.as<std::uint8_t>();
  a.topk_weights = weights.as<float>();
  a.topk_ids = ids.as<std::int32_t>();
  a.zero_expert_weight = zero.as<float>();
  const Status status = (*made)->enqueue(nullptr, a);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(weights.margin_is_intact() && ids.margin_is_intact() && zero.margin_is_intact());
  return {weights.values<float>(), zero.values<float>(), ids.values<std::int32_t>()};
}

bool same(float a, float b) {
  return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b));
}

TEST(CudaRouter, HasTheBitsOfTheCpuRouter) {
  REQUIRE_HOPPER();
  struct Size {
    std::int64_t experts, k, groups, tokens;
  };
  for (const Size& s :
       {Size{8, 2, 4, 41}, Size{60, 4, 1, 40}, Size{128, 8, 1, 33}, Size{160, 6, 8, 700},
        Size{256, 8, 8, 1500}, Size{384, 8, 1, 70}, Size{512, 10, 16, 50}, Size{1000, 32, 5, 40}}) {
    const std::vector<float> logits = logits_of(s.tokens, s.experts);
    Rng rng(3);
    std::vector<std::int32_t> input;
    std::vector<std::uint8_t> padding;
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      input.push_back(
          static_cast<std::int32_t>(rng.integer(0, 3) == 0 ? 100 + t % 5 : rng.integer(0, 49)));
      padding.push_back(rng.integer(0, 9) == 0 ? 1 : 0);
    }
    for (const Method& m : methods(s.experts, s.k, s.groups)) {
      SCOPED_TRACE(m.name + " of " + std::to_string(s.experts));
      const Result want = run_cpu(m, logits, input, padding);
      const Result got = run_gpu(m, logits, input, padding);
      ASSERT_EQ(got.ids.size(), want.ids.size());
      const std::size_t slots = want.ids.size() / padding.size();
      int wrong = 0;
      for (std::size_t i = 0; i < want.ids.size() && wrong < 3; ++i) {
        if (got.ids[i] == want.ids[i] && same(got.weights[i], want.weights[i])) continue;
        ++wrong;
        ADD_FAILURE() << "token " << i / slots << " slot " << i % slots << ": got " << got.ids[i]
                      << " " << got.weights[i] << ", want " << want.ids[i] << " "
                      << want.weights[i];
      }
      if (m.options.spec.num_zero_experts == 0) continue;
      for (std::size_t t = 0; t < padding.size(); ++t) {
        EXPECT_TRUE(same(got.zero[t], want.zero[t])) << "zero weight of token " << t;
      }
    }
  }
}

TEST(CudaRouter, ATokenIdOutsideTheTableHasNoExperts) {
  REQUIRE_HOPPER();
  for (const Method& m : methods(16, 4, 1)) {
    if (m.table.empty()) continue;
    const Result r = run_gpu(m, logits_of(3, 16), {50, -1, 7}, {0, 0, 0});
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(r.ids[i], -1);
      EXPECT_EQ(r.weights[i], 0.0F);
    }
    EXPECT_GE(r.ids[8], 0);
  }
}

TEST(CudaRouter, RefusesWhatIsAHostFunctionOrTooWide) {
  RoutingSpec spec = test::method_spec(RoutingMethod::kSimulated, 8, 2);
  EXPECT_EQ(CudaRouter::can_implement(spec).code(), StatusCode::kUnsupported);
  EXPECT_NE(CudaRouter::can_implement(spec).message().find("simulated"), std::string::npos);
  spec = test::topk_spec(ScoringFunc::kSoftmax, 1025, 8, true);
  EXPECT_NE(CudaRouter::can_implement(spec).message().find("1024"), std::string::npos);
  spec.num_experts = 1024;
  EXPECT_TRUE(CudaRouter::can_implement(spec).ok());
  spec = test::method_spec(RoutingMethod::kCustom, 2000, 2);
  EXPECT_TRUE(CudaRouter::can_implement(spec).ok()) << "its columns are the function's";
}

TEST(CudaRouter, MisuseIsAStatus) {
  REQUIRE_HOPPER();
  const std::vector<Method> all = methods(16, 4, 1);
  const auto router = std::move(CudaRouter::create(all.front().bound(), 0)).value();
  CudaRouterArgs a;
  EXPECT_TRUE(router->enqueue(nullptr, a).ok()) << "no tokens";
  a.tokens = -1;
  EXPECT_EQ(router->enqueue(nullptr, a).code(), StatusCode::kInvalidArgument);
  a.tokens = 1;
  EXPECT_NE(router->enqueue(nullptr, a).message().find("router_logits"), std::string::npos);
  EXPECT_EQ(CudaRouter::create(all.front().bound(), 99).status().code(), StatusCode::kDevice);
  Router::Options capturing = all.front().bound();
  capturing.capture = [](ConstTensorView) {};
  EXPECT_EQ(CudaRouter::create(capturing, 0).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left behind";
}

}  // namespace
}  // namespace moesaic
