// Tensors on any device: on the CPU always, on a GPU where there is one.
#include "moesaic/device_tensor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

Tensor counting(std::int64_t count) {
  Tensor t = Tensor::zeros(DType::kI32, {count}).value();
  for (std::int64_t i = 0; i < count; ++i) t.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
  return t;
}

void expect_round_trip(Device device) {
  const Tensor host = counting(1000);
  DeviceTensor there = DeviceTensor::copy_of(host.view(), device).value();
  EXPECT_EQ(there.device(), device);
  EXPECT_EQ(there.view().device, device);
  EXPECT_EQ(there.bytes(), 4000);
  EXPECT_EQ(there.span().size(), 4000U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(there.data()) % (device.is_cuda() ? 256 : 64), 0U);
  DeviceTensor again = DeviceTensor::uninitialized(device, DType::kI32, {1000}).value();
  ASSERT_TRUE(copy_tensor(there.view(), again.view()).ok());
  const DeviceTensor moved = std::move(again);
  Tensor back = Tensor::zeros(DType::kI32, {1000}).value();
  ASSERT_TRUE(copy_tensor(moved.view(), back.view()).ok());
  EXPECT_EQ(std::memcmp(back.data(), host.data(), 4000), 0);
  EXPECT_TRUE(synchronize(device).ok());
  EXPECT_TRUE(DeviceTensor::uninitialized(device, DType::kF32, {0, 5}).ok());
  EXPECT_EQ(DeviceTensor().data(), nullptr);
}

TEST(DeviceTensor, RoundTripOnTheCpu) { expect_round_trip(Device::cpu()); }

TEST(DeviceTensor, RoundTripOnAGpu) {
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason;
  expect_round_trip(Device::cuda(0));
}

TEST(DeviceTensor, MistakesAreRefused) {
  const Device nowhere = Device::cuda(99);
  EXPECT_EQ(DeviceTensor::uninitialized(nowhere, DType::kF32, {4}).status().to_string(),
            check_device(nowhere).to_string());
  expect_refusal(DeviceTensor::uninitialized(Device::cpu(), DType::kF32, {1LL << 62}).status(),
                 StatusCode::kLimitExceeded, {"shape"});
  const Tensor from = counting(6);
  Tensor to = counting(6);
  const auto copy = [&](ConstTensorView a, TensorView b) { return copy_tensor(a, b); };
  expect_refusal(copy(from.view(), {to.data(), DType::kF32, {6}}), StatusCode::kInvalidDType,
                 {"to: got F32, need I32"});
  expect_refusal(copy(from.view(), {to.data(), DType::kI32, {5}}), StatusCode::kInvalidShape,
                 {"to: got [5], need [6]"});
  expect_refusal(copy({nullptr, DType::kI32, {6}}, to.view()), StatusCode::kInvalidArgument,
                 {"from"});
  ConstTensorView apart = ConstTensorView(from.data(), DType::kI32, {3});
  apart.strides[0] = 2;
  expect_refusal(copy(apart, {to.data(), DType::kI32, {3}}), StatusCode::kInvalidLayout, {"from"});
  expect_refusal(copy(to.view(), {to.data() + 4, DType::kI32, {6}}), StatusCode::kAliasing, {"to"});
  expect_refusal(copy({from.data(), DType::kI32, {6}, Device::cuda(0)},
                      {to.data(), DType::kI32, {6}, Device::cuda(1)}),
                 StatusCode::kUnsupported, {"cuda:0", "cuda:1"});
}

}  // namespace
}  // namespace moesaic
