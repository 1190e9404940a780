// Every documented refusal of GateLinear: its code and the words that help.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "moesaic/gate.h"
#include "moesaic/tensor.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using enum DType;

Tensor zeros(DType dtype, const Shape& shape) { return Tensor::zeros(dtype, shape).value(); }

Status create(ConstTensorView weight, ConstTensorView bias = {}, GateLinear::Options options = {}) {
  return GateLinear::create(weight, bias, options).status();
}

TEST(GateMisuse, Create) {
  const Tensor w = zeros(kBF16, {4, 8});
  EXPECT_TRUE(create(w.view()).ok());
  test::expect_refusal(create({}), StatusCode::kInvalidShape, {"gate weight: got []"});
  test::expect_refusal(create(zeros(kF32, {8}).view()), StatusCode::kInvalidShape, {"[8]"});
  test::expect_refusal(create(ConstTensorView(nullptr, kF32, {0, 8})), StatusCode::kInvalidShape,
                       {"[0, 8]"});
  test::expect_refusal(create(zeros(DType::kI8, {4, 8}).view()), StatusCode::kInvalidDType,
                       {"gate weight: got I8"});
  test::expect_refusal(create(ConstTensorView(nullptr, kF32, {4, 8})), StatusCode::kInvalidArgument,
                       {"null pointer"});
  ConstTensorView strided(w.data(), kBF16, {4, 4});
  strided.strides[0] = 8;
  test::expect_refusal(create(strided), StatusCode::kInvalidLayout, {"gate weight"});

  test::expect_refusal(create(w.view(), zeros(kF32, {5}).view()), StatusCode::kInvalidShape,
                       {"gate bias: got [5], need [4]"});
  test::expect_refusal(create(w.view(), zeros(DType::kF64, {4}).view()), StatusCode::kInvalidDType,
                       {"gate bias: got F64"});
  GateLinear::Options options;
  options.logits_dtype = DType::kI32;
  test::expect_refusal(create(w.view(), {}, options), StatusCode::kInvalidDType,
                       {"logits_dtype: got I32"});
  options = {};
  options.num_threads = -1;
  test::expect_refusal(create(w.view(), {}, options), StatusCode::kInvalidArgument,
                       {"num_threads: got -1"});
}

TEST(GateMisuse, Forward) {
  const Tensor w = zeros(kBF16, {4, 8});
  const GateLinear g = GateLinear::create(w.view(), {}, {}).value();
  const Tensor x = zeros(kBF16, {3, 8});
  Tensor y = zeros(kF32, {3, 4});
  ASSERT_TRUE(g.forward(x.view(), y.view()).ok());

  test::expect_refusal(g.forward(zeros(kBF16, {3, 9}).view(), y.view()), StatusCode::kInvalidShape,
                       {"hidden_states: got [3, 9], need [num_tokens, 8]"});
  test::expect_refusal(g.forward(zeros(kBF16, {24}).view(), y.view()), StatusCode::kInvalidShape,
                       {"hidden_states: got [24]"});
  test::expect_refusal(g.forward(zeros(DType::kI32, {3, 8}).view(), y.view()),
                       StatusCode::kInvalidDType, {"hidden_states: got I32"});
  test::expect_refusal(g.forward(x.view(), zeros(kF32, {4, 4}).view()), StatusCode::kInvalidShape,
                       {"router_logits: got [4, 4], need [3, 4]"});
  test::expect_refusal(g.forward(x.view(), zeros(kBF16, {3, 4}).view()), StatusCode::kInvalidDType,
                       {"router_logits: got BF16, need F32"});
  test::expect_refusal(g.forward(x.view(), TensorView(nullptr, kF32, {3, 4})),
                       StatusCode::kInvalidArgument, {"router_logits: got a null pointer"});
  test::expect_refusal(g.forward(ConstTensorView(nullptr, kBF16, {3, 8}), y.view()),
                       StatusCode::kInvalidArgument, {"hidden_states: got a null pointer"});

  Tensor big = zeros(kF32, {3, 8});
  TensorView strided(big.data(), kF32, {3, 4});
  strided.strides[0] = 8;
  test::expect_refusal(g.forward(x.view(), strided), StatusCode::kInvalidLayout, {"router_logits"});
  ConstTensorView columns(big.data(), kBF16, {3, 8});
  columns.strides = {1, 3};
  test::expect_refusal(g.forward(columns, y.view()), StatusCode::kInvalidLayout,
                       {"hidden_states: got a stride of 3"});
  ConstTensorView far = x.view();
  for (const std::int64_t stride : {INT64_MAX, INT64_MIN, std::int64_t{1} << 58}) {
    far.strides[0] = stride;
    test::expect_refusal(g.forward(far, y.view()), StatusCode::kLimitExceeded,
                         {"hidden_states: strides reach beyond"});
  }
}

TEST(GateMisuse, ForwardRefusesOverlap) {
  const Tensor w = zeros(kF32, {4, 4});
  const GateLinear g = GateLinear::create(w.view(), {}, {}).value();
  Tensor memory = zeros(kF32, {64});
  const auto at = [&](std::int64_t i, const Shape& shape) {
    return TensorView(memory.data() + 4 * i, kF32, shape);
  };
  test::expect_refusal(g.forward(at(0, {3, 4}), at(0, {3, 4})), StatusCode::kAliasing,
                       {"hidden_states overlaps router_logits"});
  test::expect_refusal(g.forward(at(0, {3, 4}), at(11, {3, 4})), StatusCode::kAliasing,
                       {"router_logits"});
  EXPECT_TRUE(g.forward(at(0, {3, 4}), at(12, {3, 4})).ok());
  // Strided rows end later than a contiguous tensor of that shape would.
  TensorView strided = at(0, {3, 4});
  strided.strides[0] = 10;
  test::expect_refusal(g.forward(strided, at(12, {3, 4})), StatusCode::kAliasing,
                       {"hidden_states"});
  EXPECT_TRUE(g.forward(strided, at(24, {3, 4})).ok());
}

TEST(GateMisuse, RoundingsOfTheWeightsDType) {
  const Tensor w = zeros(kBF16, {4, 8}), wide = zeros(kF32, {4, 8});
  const Tensor x = zeros(kF32, {3, 8}), narrow = zeros(kBF16, {3, 8});
  Tensor y = zeros(kF32, {3, 4});
  GateLinear::Options options;
  options.force_fp32_compute = false;
  const GateLinear g = GateLinear::create(w.view(), {}, options).value();
  EXPECT_TRUE(g.forward(narrow.view(), y.view()).ok());
  test::expect_refusal(g.forward(x.view(), y.view()), StatusCode::kUnsupported,
                       {"hidden_states: got F32, need BF16", "force_fp32_compute"});
  options.logits_dtype = std::nullopt;
  GateLinear unset = GateLinear::create(wide.view(), {}, options).value();
  test::expect_refusal(unset.forward(narrow.view(), y.view()), StatusCode::kInvalidDType,
                       {"hidden_states: got BF16, need F32", "logits_dtype is unset"});
  test::expect_refusal(unset.set_logits_dtype(DType::kI32), StatusCode::kInvalidDType,
                       {"logits_dtype: got I32"});
  EXPECT_TRUE(unset.set_logits_dtype(kF32).ok());
  EXPECT_TRUE(unset.forward(narrow.view(), y.view()).ok());
  test::expect_refusal(unset.set_logits_dtype(kF32), StatusCode::kInvalidArgument,
                       {"logits_dtype: got F32 but F32 is already set", "only once"});
}

TEST(GateMisuse, Devices) {
  const Tensor w = zeros(kBF16, {4, 8});
  GateLinear::Options options;
  options.device = Device::cuda(99);
  const Status missing = create(w.view(), {}, options);
  EXPECT_EQ(missing.to_string(), check_device(options.device).to_string());
  options.logits_dtype = kI32;
  test::expect_refusal(create(w.view(), {}, options), StatusCode::kInvalidDType,
                       {"logits_dtype: got I32"});
  const Tensor bias = zeros(kBF16, {4});
  test::expect_refusal(create({w.data(), kBF16, {4, 8}, Device::cuda(0)}, {}, {}),
                       StatusCode::kInvalidArgument, {"gate weight: got memory of cuda:0"});
  test::expect_refusal(create(w.view(), {bias.data(), kBF16, {4}, Device::cuda(0)}, {}),
                       StatusCode::kInvalidArgument, {"gate bias: got memory of cuda:0"});
  // Weights are copied from the host to whichever device.
  options.logits_dtype = {};
  options.device = Device::cuda(0);
  for (const ConstTensorView& bad : {ConstTensorView(w.data(), kBF16, {4, 8}, Device::cuda(0)),
                                     ConstTensorView(w.data(), kBF16, {4, 8}, Device::cuda(1))}) {
    test::expect_refusal(create(bad, {}, options), StatusCode::kInvalidArgument,
                         {"gate weight: got memory of cuda:", "need memory of cpu"});
  }
  const GateLinear g = GateLinear::create(w.view(), {}, {}).value();
  EXPECT_EQ(g.device(), Device::cpu());
  const Tensor x = zeros(kF32, {2, 8});
  Tensor y = zeros(kF32, {2, 4});
  test::expect_refusal(g.forward({x.data(), kF32, {2, 8}, Device::cuda(0)}, y.view()),
                       StatusCode::kInvalidArgument, {"hidden_states: got memory of cuda:0"});
  test::expect_refusal(g.forward(x.view(), {y.data(), kF32, {2, 4}, Device::cuda(0)}),
                       StatusCode::kInvalidArgument, {"router_logits: got memory of cuda:0"});
  test::expect_refusal(g.enqueue({}, x.view(), y.view(), {}), StatusCode::kUnsupported,
                       {"enqueue", "CPU"});
  EXPECT_EQ(g.workspace_size(2).value(), 0);
  test::expect_refusal(g.workspace_size(-2).status(), StatusCode::kInvalidArgument,
                       {"tokens: got -2"});
}

}  // namespace
}  // namespace moesaic
