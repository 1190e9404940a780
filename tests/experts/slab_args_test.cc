// What is refused of a call in the batched format on a GPU before any GPU is asked.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "experts/sm90/catalogue_row.h"
#include "experts/sm90/experts.h"
#include "experts/sm90/experts_plan.h"
#include "support/experts_run.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

MoeProblem batched(const char* quant) {
  MoeProblem p = test::small_problem(quant);
  p.format = ActivationFormat::kBatched;
  p.max_tokens = 5;
  p.device = Device::cuda(0);
  return p;
}

// Addresses that nobody reads.
struct Call {
  MoeProblem p;
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);
  std::vector<std::int32_t> counts = std::vector<std::int32_t>(6);
  ExpertsArgs a;
  bool any_rows = false;

  explicit Call(const char* quant) : p(batched(quant)) {
    const Shape shape{6, 4, p.hidden_size};
    a.hidden_states = ConstTensorView(memory.data(), DType::kBF16, shape, p.device);
    a.output = TensorView(memory.data() + (1 << 15), DType::kBF16, shape, p.device);
    a.expert_num_tokens = counts;
  }
  void codes() {
    a.hidden_states.dtype = DType::kF8E4M3;
    a.hidden_scale = ConstTensorView(memory.data() + (3 << 14), DType::kF32, {6, 4, 2}, p.device);
    a.hidden_scale.strides = {4, 1, 24};
  }
  Status check() const { return cuda::check_slab_args(p, a, any_rows); }
};

TEST(SlabArgs, WhatIsTaken) {
  EXPECT_TRUE(Call("bf16").check().ok());
  Call general("bf16");
  general.any_rows = true;
  general.a.output.dtype = DType::kF16;
  EXPECT_TRUE(general.check().ok());
  Call codes("fp8-block");
  codes.codes();
  EXPECT_TRUE(codes.check().ok()) << codes.check().to_string();
}

TEST(SlabArgs, WhatIsRefused) {
  struct Wrong {
    StatusCode code;
    const char* text;
    std::function<void(Call&)> change;
  };
  const std::vector<Wrong> all = {
      {StatusCode::kInvalidShape, "hidden_states: got [24, 256], need [6, T, 256]",
       [](Call& c) {
         c.a.hidden_states.shape = {24, 256};
       }},
      {StatusCode::kInvalidShape, "hidden_states: got [5, 4, 256]",
       [](Call& c) {
         c.a.hidden_states.shape = {5, 4, 256};
       }},
      {StatusCode::kInvalidShape, "output: got [6, 3, 256]",
       [](Call& c) {
         c.a.output.shape = {6, 3, 256};
       }},
      {StatusCode::kLimitExceeded, "slabs of 4 rows, planned for at most 3",
       [](Call& c) { c.p.max_tokens = 3; }},
      {StatusCode::kInvalidDType, "output: got F32, need BF16",
       [](Call& c) { c.a.output.dtype = DType::kF32; }},
      {StatusCode::kInvalidDType, "hidden_states: got F16, need BF16",
       [](Call& c) { c.a.hidden_states.dtype = DType::kF16; }},
      {StatusCode::kInvalidLayout, "hidden_states",
       [](Call& c) { c.a.hidden_states.strides[0] += 256; }},
      {StatusCode::kInvalidArgument, "output: got memory of cpu",
       [](Call& c) { c.a.output.device = Device::cpu(); }},
      {StatusCode::kInvalidShape, "expert_num_tokens: got [5], need [6]",
       [](Call& c) { c.counts.resize(5), c.a.expert_num_tokens = c.counts; }},
      {StatusCode::kUnsupported, "numerics: got rows in the batched format",
       [](Call& c) {
         static std::vector<RowNumerics> rows(24);
         c.a.numerics = rows;
       }},
      {StatusCode::kUnsupported, "a1_scale",
       [](Call& c) {
         c.a.a1_scale = ConstTensorView(c.memory.data(), DType::kF32, {1}, c.p.device);
       }},
      {StatusCode::kAliasing, "output overlaps hidden_states",
       [](Call& c) {
         c.a.inplace = true;
         c.a.output.data = c.memory.data();
       }},
      {StatusCode::kAliasing, "output overlaps expert_num_tokens",
       [](Call& c) {
         c.a.expert_num_tokens = {reinterpret_cast<const std::int32_t*>(c.a.output.data), 6};
       }},
      {StatusCode::kInvalidLayout, "hidden_scale: got strides [2, 1, 24], need [4, 1, 24 or more]",
       [](Call& c) {
         c.codes(), c.a.hidden_scale.strides = {2, 1, 24};
       }},
      {StatusCode::kInvalidLayout, "hidden_scale: got strides [4, 1, 23]",
       [](Call& c) {
         c.codes(), c.a.hidden_scale.strides = {4, 1, 23};
       }},
      {StatusCode::kInvalidShape, "hidden_scale",
       [](Call& c) {
         c.codes(), c.a.hidden_scale.shape = {6, 4, 1};
       }},
      {StatusCode::kInvalidDType, "hidden_states: got BF16, need F8_E4M3",
       [](Call& c) { c.codes(), c.a.hidden_states.dtype = DType::kBF16; }},
  };
  for (const Wrong& wrong : all) {
    Call call("fp8-block");
    wrong.change(call);
    SCOPED_TRACE(wrong.text);
    expect_refusal(call.check(), wrong.code, {wrong.text});
  }
  Call other("int8");
  other.codes();
  expect_refusal(other.check(), StatusCode::kUnsupported, {"hidden_scale", "need bf16 rows"});
}

TEST(SlabArgs, TheBackendsTakeTheFormat) {
  for (const char* quant : {"bf16", "fp8-block", "int8", "gptq"}) {
    MoeProblem p = batched(quant);
    EXPECT_EQ(choose_experts(p).value()->name, "cuda_sm90") << quant;
    p.top_k = 6;
    p.apply_router_weight_on_input = true;  // prepare has done it
    EXPECT_TRUE(cuda::CudaExperts::can_implement(p).ok()) << quant;
    p.max_tokens = (std::int64_t{1} << 30) / 6 + 1;
    expect_refusal(cuda::CudaExperts::can_implement(p), StatusCode::kUnsupported,
                   {"max_tokens: got", "each of 6 local experts, need at most 2^30 rows"});
  }
  MoeProblem p = batched("bf16");
  EXPECT_EQ(choose_experts(p, "cuda_general").value()->name, "cuda_general");
  // A slab's rows are the experts' rows: as much room as that many tokens of one expert need, less
  // what only weights and sums need.
  p.format = ActivationFormat::kStandard;
  p.top_k = 1;
  p.max_tokens = 600;
  const std::int64_t standard = cuda::CudaExperts::workspace_size(p, 600).value();
  p.format = ActivationFormat::kBatched;
  const std::int64_t slabs = cuda::CudaExperts::workspace_size(p, 100).value();
  EXPECT_LT(slabs, standard);
  EXPECT_GT(slabs, standard / 4);
  expect_refusal(cuda::CudaExperts::workspace_size(p, std::int64_t{1} << 62).status(),
                 StatusCode::kLimitExceeded, {});
}

}  // namespace
}  // namespace moesaic
