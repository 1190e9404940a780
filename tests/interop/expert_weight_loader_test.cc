#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "moesaic/eplb.h"
#include "moesaic/interop/expert_weights.h"
#include "support/moe_oracle.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic::test {
namespace {

template <class T>
void refused(const Result<T>& result, StatusCode code, const char* words) {
  expect_refusal(result.status(), code, {words});
}

TEST(ExpertParamsMapping, WorkedExample) {
  EXPECT_EQ(expert_shard_name(ExpertShard::kW1), "w1");
  EXPECT_EQ(expert_shard_name(ExpertShard::kW2), "w2");
  EXPECT_EQ(expert_shard_name(ExpertShard::kW3), "w3");
  const auto mapping = make_expert_params_mapping("w1", "w2", "w3", 3, 2).value();
  ASSERT_EQ(mapping.size(), 15U);
  std::vector<std::string> held;  // pattern of w1, per physical expert
  for (std::size_t p = 0; p < 5; ++p) held.push_back(mapping[3 * p].pattern);
  EXPECT_EQ(held, (std::vector<std::string>{"experts.0.w1.", "experts.1.w1.", "experts.2.w1.",
                                            "experts.0.w1.", "experts.1.w1."}));
  EXPECT_EQ(mapping[9],
            (ExpertParamsMapping{"experts.w13_", "experts.0.w1.", 3, ExpertShard::kW1}));
  EXPECT_EQ(mapping[10],
            (ExpertParamsMapping{"experts.w2_", "experts.0.w2.", 3, ExpertShard::kW2}));
  EXPECT_EQ(mapping[11],
            (ExpertParamsMapping{"experts.w13_", "experts.0.w3.", 3, ExpertShard::kW3}));
}

TEST(ExpertParamsMapping, ATensorFillsEveryCopyOfItsExpert) {
  const auto mapping = make_expert_params_mapping("w1", "w2", "w3", 3, 2).value();
  const std::string block = "model.layers.7.mlp.";
  EXPECT_EQ(expert_param_targets(mapping, block + "experts.1.w2.weight"),
            (std::vector<ExpertParamTarget>{{block + "experts.w2_weight", 1, ExpertShard::kW2},
                                            {block + "experts.w2_weight", 4, ExpertShard::kW2}}));
  EXPECT_EQ(
      expert_param_targets(mapping, "experts.2.w3.weight_scale_inv"),
      (std::vector<ExpertParamTarget>{{"experts.w13_weight_scale_inv", 2, ExpertShard::kW3}}));
  // Experts are whole numbers between dots, and belong to the routed ones.
  for (const char* other : {"shared_experts.1.w1.weight", "experts.11.w1.weight",
                            "experts.1.w1_weight", "experts.3.w1.weight", "gate.weight"}) {
    EXPECT_TRUE(expert_param_targets(mapping, block + other).empty()) << other;
  }
}

TEST(ExpertParamsMapping, AdaptersAndLayersWithoutAGate) {
  const auto wrapped = make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 1, 0, true);
  EXPECT_EQ(
      expert_param_targets(*wrapped, "experts.0.up_proj.base_layer.weight"),
      (std::vector<ExpertParamTarget>{{"experts.base_layer.w13_weight", 0, ExpertShard::kW3}}));
  const auto plain = make_expert_params_mapping("up_proj", "down_proj", "", 2).value();
  EXPECT_EQ(plain.size(), 4U);
  EXPECT_EQ(expert_param_targets(plain, "experts.1.up_proj.weight").front().shard,
            ExpertShard::kW1);
  const auto code = [](const auto& result) { return result.status().code(); };
  EXPECT_EQ(code(make_expert_params_mapping("a", "b", "c", 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(make_expert_params_mapping("a", "b", "c", 1, -1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(make_expert_params_mapping("a", "", "c", 1)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(make_expert_params_mapping("", "b", "c", 1)), StatusCode::kInvalidArgument);
}

constexpr std::int64_t kExperts = 6;

MoeProblem problem_of(std::string_view scheme) {
  MoeProblem p;
  p.num_experts = p.num_local_experts = kExperts;
  p.top_k = 2;
  p.hidden_size = 128;
  p.intermediate_size = 128;
  p.quant = quant_scheme_from_name(scheme).value();
  p.max_tokens = 8;
  if (scheme == "int4-g128") {  // something of everything
    p.quant.weight.act_order = true;
    p.quant.weight.dtype = DType::kU4;
    p.quant.weight.zero_point = ZeroPoint::kInteger;
    p.has_expert_bias = true;
  }
  return p;
}

// Counts reads.
class CountingSource final : public ExpertSource {
 public:
  explicit CountingSource(const StackedExpertWeights& weights)
      : source_(make_stacked_source(weights)) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    ++reads[e];
    return source_->expert(e);
  }
  std::map<std::int64_t, int> reads;

 private:
  std::unique_ptr<ExpertSource> source_;
};

std::string bytes_of(const ConstTensorView& t) {
  if (!t.present()) return "none";
  const auto bytes = static_cast<std::size_t>(contiguous_bytes(t.dtype, t.shape).value());
  return {reinterpret_cast<const char*>(t.data), bytes};
}

void expect_same_expert(const ExpertWeightsView& a, const ExpertWeightsView& b) {
  EXPECT_EQ(bytes_of(a.w13), bytes_of(b.w13));
  EXPECT_EQ(bytes_of(a.w13_scale), bytes_of(b.w13_scale));
  EXPECT_EQ(bytes_of(a.w13_bias), bytes_of(b.w13_bias));
  EXPECT_EQ(bytes_of(a.w13_perm), bytes_of(b.w13_perm));
  EXPECT_EQ(bytes_of(a.w13_zero), bytes_of(b.w13_zero));
  EXPECT_EQ(bytes_of(a.w2), bytes_of(b.w2));
  EXPECT_EQ(bytes_of(a.w2_scale), bytes_of(b.w2_scale));
  EXPECT_EQ(bytes_of(a.w2_bias), bytes_of(b.w2_bias));
  EXPECT_EQ(bytes_of(a.w2_global_scale), bytes_of(b.w2_global_scale));
  EXPECT_EQ(bytes_of(a.w2_input_scale), bytes_of(b.w2_input_scale));
}

TEST(ExpertWeightLoader, EverySlotHoldsItsExpertAndEachIsReadOnce) {
  const std::vector<std::int32_t> slots = {0, 3, 3, 1, 5, 2, 4, 2};  // ranks {0 3 3 1}, {5 2 4 2}
  for (const char* scheme : {"bf16", "fp8-block", "nvfp4", "int4-g128", "int4-fp8"}) {
    const OwnedExpertWeights all = random_expert_weights(5, problem_of(scheme));
    for (int rank = 0; rank < 2; ++rank) {
      SCOPED_TRACE(std::string(scheme) + " rank " + std::to_string(rank));
      CountingSource source(all.view());
      const auto loader = ExpertWeightLoader::load(source, kExperts, {slots, 2, rank}).value();
      ASSERT_EQ(loader.num_local_experts(), 4);
      EXPECT_EQ(source.reads.size(), 3U);
      const auto stacked = make_stacked_source(loader.weights());
      for (std::int64_t slot = 0; slot < 4; ++slot) {
        const std::int32_t e = loader.local_experts()[static_cast<std::size_t>(slot)];
        EXPECT_EQ(e, slots[static_cast<std::size_t>(4 * rank + slot)]);
        EXPECT_EQ(source.reads[e], 1) << e;
        const ExpertWeightsView got = stacked->expert(slot).value();
        const auto original = make_stacked_source(all.view());
        expect_same_expert(got, original->expert(e).value());
      }
    }
  }
}

TEST(ExpertWeightLoader, WritingARowChangesOneExpert) {
  for (const char* scheme : {"fp8-block", "nvfp4", "int4-g128"}) {
    SCOPED_TRACE(scheme);
    const OwnedExpertWeights all = random_expert_weights(6, problem_of(scheme));
    CountingSource source(all.view());
    const std::vector<std::int32_t> slots = {0, 1, 2, 3, 4, 5, 0};
    auto loader = ExpertWeightLoader::load(source, kExperts, {slots}).value();
    const auto before = ExpertWeightLoader::load(source, kExperts, {slots}).value();
    std::size_t present = 0, input_scales = 0;
    for (const ExpertWeightLoader::Rows& p : loader.get_expert_weights()) {
      ++present;
      input_scales += p.name.ends_with("input_scale") ? 1 : 0;
      ASSERT_EQ(p.rows.rank(), 2);
      EXPECT_EQ(p.rows.dim(0), 7);
      const std::int64_t bytes = contiguous_bytes(p.rows.dtype, p.rows.shape).value() / 7;
      std::memset(p.rows.data + 3 * bytes, 0x5A, static_cast<std::size_t>(bytes));
    }
    EXPECT_EQ(input_scales, scheme == std::string_view("nvfp4") ? 2U : 0U);
    EXPECT_GE(present, scheme == std::string_view("int4-g128") ? 10U : 4U);
    const auto now = make_stacked_source(loader.weights());
    const auto old = make_stacked_source(before.weights());
    for (std::int64_t slot = 0; slot < 7; ++slot) {
      SCOPED_TRACE(slot);
      if (slot != 3) {
        expect_same_expert(now->expert(slot).value(), old->expert(slot).value());
        continue;
      }
      const std::string w2 = bytes_of(now->expert(3)->w2);
      EXPECT_EQ(w2, std::string(w2.size(), '\x5A'));
      const std::string scale = bytes_of(now->expert(3)->w13_scale);
      EXPECT_EQ(scale, std::string(scale.size(), '\x5A'));
    }
  }
}

// (E, 32, 16) with strides (512, 1, 32) is (E, 16, 32) in memory.
TEST(ExpertRows, TransposedScalesShareMemoryWithTheirRows) {
  Tensor scale = Tensor::zeros(DType::kF32, {2, 16, 32}).value();
  for (std::int64_t i = 0; i < 1024; ++i) scale.as<float>()[i] = static_cast<float>(i);
  TensorView parameter(scale.data(), DType::kF32, {2, 32, 16});
  parameter.strides = {512, 1, 32};
  const TensorView rows = expert_rows("w13_scale", parameter).value();
  EXPECT_EQ(rows.data, scale.data());
  EXPECT_EQ(rows.shape, (Shape{2, 512}));
  EXPECT_TRUE(rows.is_contiguous());
  rows.as<float>()[512 + 33] = -1;  // expert 1, element (1, 1) of 16 x 32
  EXPECT_EQ(
      parameter.as<float>()[parameter.strides[0] + parameter.strides[1] + parameter.strides[2]],
      -1);

  // Both forms stay where they are.
  parameter.device = Device::cuda(1);
  EXPECT_EQ(expert_rows("w13_scale", parameter).value().device, Device::cuda(1));
  const TensorView whole(scale.data(), DType::kF32, {2, 512}, Device::cuda(1));
  EXPECT_EQ(expert_rows("w13_scale", whole).value().device, Device::cuda(1));

  parameter.strides = {1024, 1, 32};  // a gap between experts
  refused(expert_rows("w13_scale", parameter), StatusCode::kInvalidLayout, "w13_scale");
  parameter.strides = {512, 32, 2};
  refused(expert_rows("w13_scale", parameter), StatusCode::kInvalidLayout, "transposed");
  refused(expert_rows("alpha", TensorView(scale.data(), DType::kF32, {})),
          StatusCode::kInvalidShape, "alpha: got a scalar");
}

// A backend of physical experts computes what one of logical experts does.
TEST(ExpertWeightLoader, RedundantExpertsComputeTheSameBits) {
  MoeProblem problem = problem_of("mxfp8");
  const OwnedExpertWeights all = random_expert_weights(7, problem);
  const OwnedRouting routing = random_routing(8, 8, kExperts, 2);
  CountingSource source(all.view());
  const auto map = initial_physical_to_logical(kExperts, kExperts + 3).value();
  const auto loader = ExpertWeightLoader::load(source, kExperts, {map}).value();
  const auto run = [&](const MoeProblem& p, const StackedExpertWeights& weights,
                       const Tensor& ids) {
    const auto stacked = make_stacked_source(weights);
    const ExpertsBackend& backend = *choose_experts(p).value();
    const auto experts = backend.create(p, *stacked).value();
    Rng rng(9);
    const Tensor x = random_normal(rng, DType::kBF16, {8, 128});
    Tensor workspace =
        Tensor::uninitialized(DType::kU8, {experts->workspace_size(8).value()}).value();
    Tensor output = Tensor::zeros(DType::kF32, {8, 128}).value();
    poison(workspace.view());
    poison(output.view());
    ExpertsArgs args;
    args.hidden_states = x.view();
    args.topk_ids = ids.view();
    args.topk_weights = routing.weights.view();
    args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
    args.output = output.view();
    const Status status = experts->run(args);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return bytes_of(output.view());
  };
  const std::string logical = run(problem, all.view(), routing.ids);
  Tensor physical = Tensor::zeros(DType::kI32, {8, 2}).value();
  for (int i = 0; i < 16; ++i) {  // copies where there are any, in every other token
    const std::int32_t e = routing.ids.as<std::int32_t>()[i];
    physical.as<std::int32_t>()[i] = e < 3 && i % 4 < 2 ? e + 6 : e;
  }
  problem.num_experts = problem.num_local_experts = kExperts + 3;
  EXPECT_EQ(run(problem, loader.weights(), physical), logical);
}

TEST(ExpertWeightLoader, RefusesMapsAndExpertsThatDoNotFit) {
  const OwnedExpertWeights all = random_expert_weights(5, problem_of("bf16"));
  CountingSource source(all.view());
  const auto load = [&](std::vector<std::int32_t> slots, int size = 1, int rank = 0) {
    return ExpertWeightLoader::load(source, kExperts, {std::move(slots), size, rank});
  };
  const std::vector<std::int32_t> six = {0, 1, 2, 3, 4, 5};
  refused(load(six, 4), StatusCode::kInvalidArgument, "6 slots for ep_size 4");
  refused(load(six, 0), StatusCode::kInvalidArgument, "ep_size 0");
  refused(load(six, 2, 2), StatusCode::kInvalidArgument, "ep_rank: got 2");
  refused(load({0, 1, 2, 3, 4, 6}), StatusCode::kInvalidArgument, "got 6 in slot 5");
  refused(load({0, 1, 2, 3, 4, 4}), StatusCode::kInvalidArgument, "expert 5 has no slot");
  EXPECT_TRUE(source.reads.empty());  // all of it before anything is read

  // An expert that differs from the others.
  class OddSource final : public ExpertSource {
   public:
    explicit OddSource(const StackedExpertWeights& w) : source_(make_stacked_source(w)) {}
    Result<ExpertWeightsView> expert(std::int64_t e) override {
      Result<ExpertWeightsView> view = source_->expert(e);
      if (e == 4) view->w2 = ConstTensorView(view->w2.data, DType::kBF16, {64, 128});
      if (e == 5) view->w2 = {};
      return view;
    }

   private:
    std::unique_ptr<ExpertSource> source_;
  };
  OddSource odd(all.view());
  refused(ExpertWeightLoader::load(odd, kExperts, {six}), StatusCode::kInvalidShape,
          "expert 4: w2: got [64, 128], need [128, 128]");
  refused(ExpertWeightLoader::load(odd, kExperts, {{0, 1, 2, 3, 5, 4}, 2, 1}),
          StatusCode::kInvalidShape, "expert 4: w2");
  OwnedExpertWeights fewer = random_expert_weights(5, problem_of("bf16"));
  const auto five = make_stacked_source(fewer.view());
  EXPECT_FALSE(ExpertWeightLoader::load(*five, 7, {{0, 1, 2, 3, 4, 5, 6}}).ok());
}

TEST(ExpertWeightLoader, RefusesMemoryOfAGpuAndHalvesOfBytes) {
  class OneView final : public ExpertSource {
   public:
    explicit OneView(const ConstTensorView& view) : view_(view) {}
    Result<ExpertWeightsView> expert(std::int64_t) override {
      ExpertWeightsView v;
      v.w13 = v.w2 = view_;
      return v;
    }

   private:
    ConstTensorView view_;
  };
  const Tensor memory = Tensor::zeros(DType::kU8, {64}).value();
  OneView there({memory.data(), DType::kF32, {2, 8}, Device::cuda(0)});
  refused(ExpertWeightLoader::load(there, 2, {{0, 1}}), StatusCode::kInvalidArgument,
          "expert 0: w13: got memory of cuda:0");
  // Two of them fill whole bytes, one does not.
  OneView odd({memory.data(), DType::kU4, {3, 5}});
  refused(ExpertWeightLoader::load(odd, 2, {{0, 1}}), StatusCode::kInvalidShape,
          "expert 0: w13: shape: [3, 5] of U4 does not fill whole bytes");
}

}  // namespace
}  // namespace moesaic::test
