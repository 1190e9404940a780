// Every documented refusal of Router: its code and the words that help.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "router/device_router.h"
#include "router/router_fixture.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor zeros(DType dtype, const Shape& shape) { return Tensor::zeros(dtype, shape).value(); }

RoutingSpec plain(std::int64_t experts = 8, std::int64_t k = 2) {
  return test::topk_spec(ScoringFunc::kSoftmax, experts, k, false);
}

TEST(RouterMisuse, SpecValues) {
  const auto refused = [](const RoutingSpec& spec, const std::string& words) {
    Router::Options options;
    options.spec = spec;
    test::expect_refusal(Router::create(options).status(), StatusCode::kInvalidArgument,
                         {words.c_str()});
  };
  refused(plain(0, 1), "num_experts: got 0");
  refused(plain(8, 9), "routing.top_k: got 9");
  refused(plain(8, 0), "routing.top_k: got 0");
  refused(plain(-4, 1), "num_experts: got -4");
  RoutingSpec s = plain();
  s.routed_scaling_factor = std::nan("");
  refused(s, "routing.routed_scaling_factor: got nan");
  s.routed_scaling_factor = 1e300;  // finite, but not in fp32
  refused(s, "routing.routed_scaling_factor: got 1e+300");
  s = plain();
  s.renorm_floor = -1;
  refused(s, "routing.renorm_floor: got -1");
  for (const double bad : {1e-50, 1e-40, 1e300}) {  // 0, subnormal and infinite in fp32
    s.renorm_floor = bad;
    refused(s, "routing.renorm_floor: got");
    s.renorm_floor = 0;
    s.renorm_epsilon = bad;
    refused(s, "routing.renorm_epsilon: got");
    s.renorm_epsilon = 0;
  }
  s = plain();
  s.num_expert_group = 2;
  refused(s, "routing.num_expert_group: got 2 with method topk");
  s = plain();
  s.num_zero_experts = 2;
  refused(s, "routing.num_zero_experts: got 2");

  const auto grouped = [](std::int64_t k, std::int64_t groups, std::int64_t topk_group) {
    return test::grouped_spec(ScoringFunc::kSigmoid, 8, k, true, groups, topk_group);
  };
  refused(grouped(2, 0, 1), "routing.num_expert_group: got 0");
  refused(grouped(2, 4, 0), "routing.topk_group: got 0");
  refused(grouped(2, 4, 5), "routing.topk_group: got 5");
  refused(grouped(5, 4, 2), "routing.top_k: got 5, need at most 4");

  s = plain();
  s.group_by_best_two = true;
  refused(s, "routing.group_by_best_two: got true with method topk");
  s = grouped(2, 4, 2);
  s.has_expert_scale = true;
  refused(s, "routing.has_expert_scale: got true with method grouped_topk");

  s = test::method_spec(RoutingMethod::kSparseMixer, 8, 3);
  refused(s, "routing.top_k: got 3");
  s = test::method_spec(RoutingMethod::kSparseMixer, 8, 2);
  s.renormalize = true;
  refused(s, "routing.renormalize: got true with method sparse_mixer");
  s.renormalize = false;
  s.jitter_eps = -0.5;
  refused(s, "routing.jitter_eps: got -0.5");
  s = test::method_spec(RoutingMethod::kPNorm, 8, 2);
  s.p_norm = 0;
  refused(s, "routing.p_norm: got 0");
  for (const double bad : {1e-50, 1e-40, 1e-38, 3e38, 1e300}) {  // it or its inverse
    s.p_norm = bad;
    refused(s, "routing.p_norm: got");
  }
  s.p_norm = 2;
  s.renormalize = true;
  refused(s, "routing.renormalize: got true with method p_norm");
  for (const auto method :
       {RoutingMethod::kPNorm, RoutingMethod::kTopKSoftmax, RoutingMethod::kSparseMixer}) {
    s = test::method_spec(method, 8, 2);
    s.scoring_func = ScoringFunc::kSigmoid;
    refused(s, "routing.scoring_func: got sigmoid with method");
  }
  s = test::method_spec(RoutingMethod::kLlama4, 8, 1);
  s.scoring_func = ScoringFunc::kSqrtSoftplus;
  refused(s, "routing.scoring_func: got sqrtsoftplus with method llama4");
  s = test::method_spec(RoutingMethod::kLlama4, 8, 1);
  s.renormalize = true;
  refused(s, "routing.renormalize: got true with method llama4");
  for (const auto method :
       {RoutingMethod::kLlama4, RoutingMethod::kCustom, RoutingMethod::kSimulated}) {
    s = test::method_spec(method, 8, 1);
    s.routed_scaling_factor = 2;
    refused(s, "routing.routed_scaling_factor: got 2 with method");
  }
  s = test::method_spec(RoutingMethod::kTopK, 8, 2);
  s.method = static_cast<RoutingMethod>(77);
  refused(s, "routing.method: got 77, need one of RoutingMethod");
  s = test::method_spec(RoutingMethod::kTopK, 8, 2);
  s.scoring_func = static_cast<ScoringFunc>(77);
  refused(s, "routing.scoring_func: got 77, need one of ScoringFunc");
  for (const auto method :
       {RoutingMethod::kTopKSoftmax, RoutingMethod::kLlama4, RoutingMethod::kSparseMixer,
        RoutingMethod::kPNorm, RoutingMethod::kCustom, RoutingMethod::kSimulated}) {
    s = test::method_spec(method, 8, 2);
    s.has_correction_bias = true;
    refused(s, "routing.has_correction_bias: got true with method");
  }
  s = test::method_spec(RoutingMethod::kZeroExpert, 8, 2);
  s.num_zero_experts = 2;
  refused(s, "routing.has_correction_bias: got false with method zero_expert");
  s = test::method_spec(RoutingMethod::kZeroExpert, 8, 2);
  s.has_correction_bias = true;
  refused(s, "routing.num_zero_experts: got 0");
}

// A number of another rule than the spec's, which would be ignored.
TEST(RouterMisuse, NumbersThatNothingReads) {
  const auto refused = [](const RoutingSpec& spec, const std::string& words) {
    Router::Options options;
    options.spec = spec;
    test::expect_refusal(Router::create(options).status(), StatusCode::kInvalidArgument,
                         {words.c_str(), "do not read it"});
  };
  RoutingSpec s = plain();
  s.renorm_floor = 1e-12;
  refused(s, "routing.renorm_floor: got 1e-12 with method topk and renormalize false");
  s = plain();
  s.renorm_epsilon = 1e-6;
  refused(s, "routing.renorm_epsilon: got 1e-06 with method topk and renormalize false");
  s.renormalize = true;
  s.method = RoutingMethod::kTopKSoftmax;
  refused(s, "routing.renorm_epsilon: got 1e-06 with method topk_softmax");
  s = plain();
  s.p_norm = 2;
  refused(s, "routing.p_norm: got 2 with method topk");
  s = test::method_spec(RoutingMethod::kPNorm, 8, 2);
  s.jitter_eps = 0.1;
  refused(s, "routing.jitter_eps: got 0.1 with method p_norm");
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kSimulated, 8, 2);
  options.spec.renormalize = true;
  options.simulation_strategy = "uniform_random";
  test::expect_refusal(Router::create(options).status(), StatusCode::kInvalidArgument,
                       {"routing.renormalize: got true with method simulated"});
}

TEST(RouterMisuse, Parts) {
  const auto refused = [](const Router::Options& options, StatusCode code,
                          const std::string& words) {
    test::expect_refusal(Router::create(options).status(), code, {words.c_str()});
  };
  constexpr auto kArgument = StatusCode::kInvalidArgument;
  const Tensor bias = zeros(DType::kF32, {8});
  Router::Options o;
  o.spec = plain();
  o.correction_bias = bias.view();
  refused(o, kArgument, "correction_bias: given, need none");
  o.spec.has_correction_bias = true;
  o.correction_bias = {};
  refused(o, kArgument, "correction_bias: absent, need it");
  const Tensor short_bias = zeros(DType::kF32, {7});
  o.correction_bias = short_bias.view();
  refused(o, StatusCode::kInvalidShape, "correction_bias: got [7], need [8]");
  const Tensor wrong = zeros(DType::kBF16, {8});
  o.correction_bias = wrong.view();
  refused(o, StatusCode::kInvalidDType, "correction_bias: got BF16, need F32");
  for (const double bad : {static_cast<double>(std::nanf("")), kInfinity, -kInfinity}) {
    Tensor values = zeros(DType::kF32, {8});
    values.as<float>()[5] = static_cast<float>(bad);
    o.correction_bias = values.view();
    refused(o, kArgument, "correction_bias[5]: got");
  }
  Tensor wide = zeros(DType::kF32, {16});
  ConstTensorView strided(wide.data(), DType::kF32, {8});
  strided.strides[0] = 2;
  o.correction_bias = strided;
  refused(o, StatusCode::kInvalidLayout, "correction_bias");

  o = {};
  o.spec = plain();
  o.expert_scale = bias.view();
  refused(o, kArgument, "expert_scale: given, need none");
  o.spec.has_expert_scale = true;
  o.expert_scale = {};
  refused(o, kArgument, "expert_scale: absent, need it");
  o.expert_scale = short_bias.view();
  refused(o, StatusCode::kInvalidShape, "expert_scale: got [7], need [8]");
  o.expert_scale = wrong.view();
  refused(o, StatusCode::kInvalidDType, "expert_scale: got BF16, need F32");
  Tensor endless = zeros(DType::kF32, {8});
  endless.as<float>()[3] = static_cast<float>(kInfinity);
  o.expert_scale = endless.view();
  refused(o, kArgument, "expert_scale[3]: got inf");

  const Tensor table = zeros(DType::kI32, {5, 2});
  o = {};
  o.spec = plain();
  o.hash_table = table.view();
  refused(o, kArgument, "hash_table: given, need none with method topk");
  o.spec.method = RoutingMethod::kHash;
  o.spec.scoring_func = ScoringFunc::kSqrtSoftplus;
  o.hash_table.device = Device::cuda(0);
  refused(o, kArgument, "hash_table: got memory of cuda:0, need memory of cpu");
  o.spec = plain();
  o.hash_table = {};
  o.vision_token_base = 3;
  refused(o, kArgument, "vision_token_base: got 3, need 0");
  o.vision_token_base = -1;
  refused(o, kArgument, "vision_token_base: got -1");
  o.vision_token_base = 0;
  o.vision_bias = bias.view();
  refused(o, kArgument, "vision_bias: given, need none");
  o.vision_bias = {};
  o.custom = [](ConstTensorView, ConstTensorView, bool, TensorView, TensorView) {
    return Status();
  };
  refused(o, kArgument, "custom: given, need none");
  o.custom = {};
  o.simulation_strategy = "uniform_random";
  refused(o, kArgument, "simulation_strategy: given, need none");
  o.simulation_strategy.clear();
  o.num_fused_shared_experts = -1;
  refused(o, kArgument, "num_fused_shared_experts: got -1");
  o.num_fused_shared_experts = 0;
  o.shared_expert_weight = static_cast<float>(kInfinity);
  refused(o, kArgument, "shared_expert_weight: got inf");
  o.shared_expert_weight = 1;
  o.num_threads = -2;
  refused(o, kArgument, "num_threads: got -2");

  o = {};
  o.spec = test::method_spec(RoutingMethod::kCustom, 8, 2);
  refused(o, kArgument, "custom: absent, need it with method custom");
  o.spec = test::method_spec(RoutingMethod::kSimulated, 8, 2);
  refused(o, kArgument, "simulation_strategy: absent, need it");

  o.spec = test::method_spec(RoutingMethod::kHash, 8, 2);
  o.spec.scoring_func = ScoringFunc::kSqrtSoftplus;
  refused(o, kArgument, "hash_table: absent, need it with method hash");
  const Tensor narrow = zeros(DType::kI32, {5, 3});
  o.hash_table = narrow.view();
  refused(o, StatusCode::kInvalidShape, "hash_table: got [5, 3], need [vocabulary, top_k 2]");
  const Tensor floats = zeros(DType::kF32, {5, 2});
  o.hash_table = floats.view();
  refused(o, StatusCode::kInvalidDType, "hash_table: got F32, need I32");
  for (const std::int32_t bad : {-1, 8}) {
    Tensor values = zeros(DType::kI32, {5, 2});
    values.as<std::int32_t>()[7] = bad;
    o.hash_table = values.view();
    refused(o, kArgument, "hash_table[3, 1]: got expert " + std::to_string(bad));
  }
  o.hash_table = table.view();
  o.vision_token_base = 10;
  refused(o, kArgument, "vision_bias: absent, need it");
}

// A good call of which each test breaks one thing.
struct Call {
  Router router;
  Tensor logits = zeros(DType::kF32, {3, 8});
  Tensor weights = zeros(DType::kF32, {3, 2});
  Tensor ids = zeros(DType::kI32, {3, 2});
  Router::Args args;
  explicit Call(const Router::Options& options) : router(Router::create(options).value()) {
    args.router_logits = logits.view();
    args.topk_weights = weights.view();
    args.topk_ids = ids.view();
  }
};

Router::Options options_of(const RoutingSpec& spec) {
  Router::Options o;
  o.spec = spec;
  return o;
}

TEST(RouterMisuse, Tensors) {
  Call c(options_of(plain()));
  ASSERT_TRUE(c.router.select_experts(c.args).ok());
  const auto refused = [&](auto&& change, StatusCode code, const std::string& words) {
    Router::Args args = c.args;
    change(args);
    test::expect_refusal(c.router.select_experts(args), code, {words.c_str()});
  };
  const Tensor l9 = zeros(DType::kF32, {3, 9}), li = zeros(DType::kI32, {3, 8});
  refused([&](auto& a) { a.router_logits = l9.view(); }, StatusCode::kInvalidShape,
          "router_logits: got [3, 9], need [num_tokens, 8]");
  refused([&](auto& a) { a.router_logits = {}; }, StatusCode::kInvalidShape,
          "router_logits: got []");
  refused([&](auto& a) { a.router_logits = li.view(); }, StatusCode::kInvalidDType,
          "router_logits: got I32");
  refused(
      [&](auto& a) {
        a.router_logits = ConstTensorView(nullptr, DType::kF32, {3, 8});
      },
      StatusCode::kInvalidArgument, "router_logits: got a null pointer");
  refused(
      [&](auto& a) {
        a.router_logits = ConstTensorView(l9.data(), DType::kF32, {3, 8});
        a.router_logits.strides[0] = 9;
      },
      StatusCode::kInvalidLayout, "router_logits");
  Tensor w3 = zeros(DType::kF32, {3, 3}), wb = zeros(DType::kBF16, {3, 2});
  refused([&](auto& a) { a.topk_weights = w3.view(); }, StatusCode::kInvalidShape,
          "topk_weights: got [3, 3], need [3, 2]");
  refused([&](auto& a) { a.topk_weights = wb.view(); }, StatusCode::kInvalidDType,
          "topk_weights: got BF16, need F32");
  Tensor i4 = zeros(DType::kI32, {4, 2}), u8 = zeros(DType::kU8, {3, 2});
  refused([&](auto& a) { a.topk_ids = i4.view(); }, StatusCode::kInvalidShape,
          "topk_ids: got [4, 2], need [3, 2]");
  refused([&](auto& a) { a.topk_ids = u8.view(); }, StatusCode::kInvalidDType,
          "topk_ids: got U8, need I32, I64 or U32");
  refused([&](auto& a) { a.topk_ids = {}; }, StatusCode::kInvalidShape, "topk_ids: got []");
  const Tensor mask2 = zeros(DType::kU8, {2}), maski = zeros(DType::kI32, {3});
  refused([&](auto& a) { a.padding_mask = mask2.view(); }, StatusCode::kInvalidShape,
          "padding_mask: got [2], need [3]");
  refused([&](auto& a) { a.padding_mask = maski.view(); }, StatusCode::kInvalidDType,
          "padding_mask: got I32, need U8");
  refused(
      [&](auto& a) {
        a.topk_weights = TensorView(c.logits.data(), DType::kF32, {3, 2});
      },
      StatusCode::kAliasing, "router_logits overlaps topk_weights");
  refused(
      [&](auto& a) {
        a.topk_ids = TensorView(c.weights.data(), DType::kI32, {3, 2});
      },
      StatusCode::kAliasing, "topk_weights overlaps topk_ids");
}

TEST(RouterMisuse, HashAndZeroExpertTensors) {
  RoutingSpec spec = test::method_spec(RoutingMethod::kHash, 8, 2);
  spec.scoring_func = ScoringFunc::kSqrtSoftplus;
  Router::Options options = options_of(spec);
  const Tensor table = zeros(DType::kI32, {5, 2});
  options.hash_table = table.view();
  Call c(options);
  test::expect_refusal(c.router.select_experts(c.args), StatusCode::kInvalidShape,
                       {"input_ids: got []"});
  const Tensor wide = zeros(DType::kI64, {3});
  c.args.input_ids = wide.view();
  test::expect_refusal(c.router.select_experts(c.args), StatusCode::kInvalidDType,
                       {"input_ids: got I64, need I32"});
  for (const std::int32_t bad : {-1, 5}) {
    const Tensor tokens = test::vector_i32({0, bad, 4});
    c.args.input_ids = tokens.view();
    test::expect_refusal(c.router.select_experts(c.args), StatusCode::kInvalidArgument,
                         {("input_ids[1]: got " + std::to_string(bad) + ", need 0 to 4").c_str()});
  }

  spec = test::method_spec(RoutingMethod::kZeroExpert, 6, 2);
  spec.num_zero_experts = 2;
  spec.has_correction_bias = true;
  const Tensor bias = zeros(DType::kF32, {8});
  options = options_of(spec);
  options.correction_bias = bias.view();
  Call z(options);
  const Tensor x = zeros(DType::kBF16, {3, 4});
  Tensor out = zeros(DType::kBF16, {3, 4});
  test::expect_refusal(z.router.select_experts(z.args), StatusCode::kInvalidShape,
                       {"hidden_states: got []"});
  z.args.hidden_states = x.view();
  test::expect_refusal(z.router.select_experts(z.args), StatusCode::kInvalidShape,
                       {"zero_expert_output: got [], need [3, 4]"});
  Tensor f16 = zeros(DType::kF16, {3, 4});
  z.args.zero_expert_output = f16.view();
  test::expect_refusal(z.router.select_experts(z.args), StatusCode::kInvalidDType,
                       {"zero_expert_output: got F16, need BF16"});
  z.args.zero_expert_output = TensorView(const_cast<std::byte*>(x.data()), DType::kBF16, {3, 4});
  test::expect_refusal(z.router.select_experts(z.args), StatusCode::kAliasing,
                       {"hidden_states overlaps zero_expert_output"});
  z.args.zero_expert_output = out.view();
  EXPECT_TRUE(z.router.select_experts(z.args).ok());
  z.args.hidden_states.strides[0] = INT64_MAX;
  test::expect_refusal(z.router.select_experts(z.args), StatusCode::kLimitExceeded,
                       {"hidden_states: strides reach beyond"});
}

// What nobody would write, or a function could not tell.
TEST(RouterMisuse, TensorsThatTheMethodDoesNotFit) {
  Call plain(options_of(test::topk_spec(ScoringFunc::kSoftmax, 8, 2, true)));
  Tensor out = zeros(DType::kF32, {3, 4});
  plain.args.zero_expert_output = out.view();
  test::expect_refusal(plain.router.select_experts(plain.args), StatusCode::kInvalidArgument,
                       {"zero_expert_output: got one without zero experts, need none"});

  Router::Options options = options_of(test::method_spec(RoutingMethod::kCustom, 8, 2));
  options.custom = [](ConstTensorView, ConstTensorView, bool, TensorView, TensorView ids) {
    std::fill_n(ids.as<std::int32_t>(), 6, 0);
    return Status();
  };
  Call custom(options);
  EXPECT_TRUE(custom.router.select_experts(custom.args).ok());
  custom.args.hidden_states = out.view();
  EXPECT_TRUE(custom.router.select_experts(custom.args).ok());
  for (const Shape& shape : {Shape{2, 4}, Shape{4, 3}, Shape{3}, Shape{1, 3, 4}}) {
    custom.args.hidden_states = ConstTensorView(out.data(), DType::kF32, shape);
    test::expect_refusal(custom.router.select_experts(custom.args), StatusCode::kInvalidShape,
                         {"hidden_states: got", "need [3, hidden_size]"});
  }
}

TEST(RouterMisuse, EplbState) {
  Call c(options_of(plain(2, 1)));
  c.logits = zeros(DType::kF32, {3, 2});
  c.weights = zeros(DType::kF32, {3, 1});
  c.ids = zeros(DType::kI32, {3, 1});
  c.args.router_logits = c.logits.view();
  c.args.topk_weights = c.weights.view();
  c.args.topk_ids = c.ids.view();
  const std::vector<std::int32_t> good_map = {0, 2, 1, -1}, good_count = {2, 1};
  std::vector<std::int32_t> load(3, 0);
  const auto refused = [&](std::vector<std::int32_t> map, std::vector<std::int32_t> count,
                           std::span<std::int32_t> loads, std::int64_t replicas,
                           const std::string& words) {
    const EplbState state{map, count, loads, replicas, true};
    c.args.eplb = &state;
    test::expect_refusal(c.router.select_experts(c.args), StatusCode::kInvalidArgument,
                         {words.c_str()});
    c.args.eplb = nullptr;
  };
  const EplbState good{good_map, good_count, load, 2, true};
  c.args.eplb = &good;
  ASSERT_TRUE(c.router.select_experts(c.args).ok());
  refused(good_map, good_count, load, 0, "eplb.max_replicas: got 0");
  refused({0, 1}, good_count, load, 2, "eplb.logical_to_physical: got 2 entries, need 4 ([2, 2])");
  refused(good_map, {1}, load, 2, "eplb.replica_count: got 1 entries, need 2");
  refused(good_map, good_count, {}, 2, "eplb.load: absent");
  refused(good_map, {2, 0}, load, 2, "eplb.replica_count[1]: got 0");
  refused(good_map, {3, 1}, load, 2, "eplb.replica_count[0]: got 3");
  refused(good_map, {2, 2}, load, 2, "eplb.logical_to_physical[1, 1]: got -1, need 0 to 2");
  refused({0, 3, 1, -1}, good_count, load, 2, "eplb.logical_to_physical[0, 1]: got 3");

  Router::Options options = options_of(plain());
  options.num_fused_shared_experts = 1;
  const Router shared = Router::create(options).value();
  Router::Args args;
  const Tensor l = zeros(DType::kF32, {1, 8});
  Tensor w = zeros(DType::kF32, {1, 3}), ids = zeros(DType::kI32, {1, 3});
  args.router_logits = l.view();
  args.topk_weights = w.view();
  args.topk_ids = ids.view();
  args.eplb = &good;
  test::expect_refusal(shared.select_experts(args), StatusCode::kUnsupported,
                       {"eplb: given with 1 fused shared experts"});
}

TEST(RouterMisuse, Devices) {
  const Device gpu = Device::cuda(0);
  Router::Options options = options_of(plain());
  options.device = Device::cuda(99);
  EXPECT_EQ(Router::create(options).status().to_string(), check_device(options.device).to_string());
  const Tensor bias = zeros(DType::kF32, {8});
  options = options_of(plain());
  options.spec.scoring_func = ScoringFunc::kSigmoid;
  options.spec.has_correction_bias = true;
  options.correction_bias = {bias.data(), DType::kF32, {8}, gpu};
  test::expect_refusal(Router::create(options).status(), StatusCode::kInvalidArgument,
                       {"correction_bias: got memory of cuda:0"});
  const Router here = Router::create(options_of(plain())).value();
  EXPECT_EQ(here.device(), Device::cpu());
  const Tensor logits = zeros(DType::kF32, {3, 8});
  Tensor weights = zeros(DType::kF32, {3, 2}), ids = zeros(DType::kI32, {3, 2});
  const auto on = [&](Device device) {
    Router::Args a;
    a.router_logits = logits.view();
    a.topk_weights = weights.view();
    a.topk_ids = ids.view();
    a.router_logits.device = a.topk_weights.device = a.topk_ids.device = device;
    return a;
  };
  EXPECT_TRUE(here.select_experts(on(Device::cpu())).ok());
  Router::Args mixed = on(Device::cpu());
  mixed.topk_ids.device = gpu;
  test::expect_refusal(here.select_experts(mixed), StatusCode::kInvalidArgument,
                       {"topk_ids: got memory of cuda:0, need memory of cpu"});

  // What a router on a GPU says before it looks at an address.
  const auto check = [&](const Router::Args& a) {
    return router::check_device_select_args(a, here.spec(), here.slots(), gpu);
  };
  EXPECT_TRUE(check(on(gpu)).ok()) << check(on(gpu)).to_string();
  test::expect_refusal(check(on(Device::cpu())), StatusCode::kInvalidArgument,
                       {"router_logits: got memory of cpu, need memory of cuda:0"});
  Router::Args a = on(gpu);
  a.router_logits.dtype = DType::kBF16;
  EXPECT_TRUE(check(a).ok());
  a.router_logits.dtype = DType::kI32;
  test::expect_refusal(check(a), StatusCode::kInvalidDType,
                       {"router_logits: got I32, need F32, BF16 or F16"});
  a = on(gpu);
  a.topk_ids.dtype = DType::kU8;
  test::expect_refusal(check(a), StatusCode::kInvalidDType,
                       {"topk_ids: got U8, need I32, I64 or U32"});
  a.topk_ids.dtype = DType::kI64;
  const auto custom = test::method_spec(RoutingMethod::kCustom, 8, here.slots());
  test::expect_refusal(router::check_device_select_args(a, custom, here.slots(), gpu),
                       StatusCode::kInvalidDType, {"topk_ids: got I64, need I32 with custom"});
  a = on(gpu);
  a.topk_weights.shape = Shape{3, 3};
  test::expect_refusal(check(a), StatusCode::kInvalidShape, {"topk_weights: got [3, 3]"});
  a = on(gpu);
  a.topk_ids.data = weights.data();
  test::expect_refusal(check(a), StatusCode::kAliasing, {"topk_ids", "topk_weights"});
  const EplbState eplb;
  a = on(gpu);
  a.eplb = &eplb;
  test::expect_refusal(check(a), StatusCode::kUnsupported, {"eplb"});

  // Zero experts: rows, an output of their shape, and memory for their weights.
  auto zero_experts = test::method_spec(RoutingMethod::kZeroExpert, 6, here.slots());
  zero_experts.num_zero_experts = 2;
  const auto check_zero = [&](const Router::Args& args) {
    return router::check_device_select_args(args, zero_experts, here.slots(), gpu);
  };
  a = on(gpu);
  const std::int64_t rows = a.router_logits.dim(0);
  test::expect_refusal(check_zero(a), StatusCode::kInvalidShape, {"hidden_states", "zero experts"});
  Tensor x = zeros(DType::kBF16, {rows, 16}), out = zeros(DType::kBF16, {rows, 16});
  a.hidden_states = {x.data(), DType::kBF16, x.shape(), gpu};
  a.zero_expert_output = {out.data(), DType::kBF16, {rows, 8}, gpu};
  test::expect_refusal(check_zero(a), StatusCode::kInvalidShape, {"zero_expert_output"});
  a.zero_expert_output = {out.data(), DType::kBF16, out.shape(), gpu};
  test::expect_refusal(check_zero(a), StatusCode::kWorkspaceTooSmall, {"workspace: got 0 bytes"});
  Tensor workspace = zeros(DType::kF32, {rows});
  a.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
  EXPECT_TRUE(check_zero(a).ok()) << check_zero(a).to_string();
  a.workspace = {out.data(), static_cast<std::size_t>(out.bytes())};
  test::expect_refusal(check_zero(a), StatusCode::kAliasing, {"zero_expert_output", "workspace"});
}

TEST(RouterMisuse, FunctionsAreForTheDevice) {
  Router::Options options;
  options.spec = test::method_spec(RoutingMethod::kCustom, 8, 2);
  options.custom_on_device = [](Stream, ConstTensorView, ConstTensorView, bool, TensorView,
                                TensorView) { return Status(); };
  test::expect_refusal(Router::create(options).status(), StatusCode::kUnsupported,
                       {"custom_on_device: got one for a router on cpu, need custom"});
  options.custom_on_device = {};
  options.custom = [](ConstTensorView, ConstTensorView, bool, TensorView, TensorView) {
    return Status();
  };
  options.device = Device::cuda(0);
  test::expect_refusal(Router::create(options).status(), StatusCode::kUnsupported,
                       {"custom: got one for a router on cuda:0, need custom_on_device"});
  const Router here = Router::create(test::with(plain())).value();
  test::expect_refusal(here.enqueue({}, {}), StatusCode::kUnsupported, {"enqueue", "CPU"});
  EXPECT_EQ(here.workspace_size(9).value(), 0);
  test::expect_refusal(here.workspace_size(-9).status(), StatusCode::kInvalidArgument,
                       {"tokens: got -9"});
}

}  // namespace
}  // namespace moesaic
