// A gate on a GPU and its logits, for tests.
#pragma once

#include <gtest/gtest.h>

#include <optional>

#include "moesaic/device_tensor.h"
#include "moesaic/gate.h"

namespace moesaic::test {

inline constexpr Device kGateGpu = Device::cuda(0);

inline GateLinear gate_on_gpu(const Tensor& weight, const Tensor& bias,
                              std::optional<DType> logits_dtype, bool fp32) {
  GateLinear::Options options;
  options.device = kGateGpu;
  options.logits_dtype = logits_dtype;
  options.force_fp32_compute = fp32;
  return GateLinear::create(weight.view(), bias.view(), options).value();
}

inline Tensor logits_of(const GateLinear& gate, const DeviceTensor& x) {
  const Shape shape{x.view().dim(0), gate.num_experts()};
  DeviceTensor out = DeviceTensor::uninitialized(kGateGpu, gate.logits_dtype(), shape).value();
  const Status status = gate.forward(x.view(), out.view());
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(synchronize(kGateGpu).ok());
  Tensor host = Tensor::zeros(gate.logits_dtype(), shape).value();
  EXPECT_TRUE(copy_tensor(out.view(), host.view()).ok());
  return host;
}

}  // namespace moesaic::test
