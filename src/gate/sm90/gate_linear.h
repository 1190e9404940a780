// GateLinear on a Hopper GPU: weight and bias on the device, logits in fp32 whatever the dtypes.
#pragma once

#include <cstdint>

#include "cuda/device_memory.h"
#include "cuda/experts_prologue.h"
#include "gate/sm90/gate.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::cuda {

class CudaGate {
 public:
  // Host tensors as GateLinear::create takes them; copied to the current device, F16 weights as
  // F32. Errors: shapes and dtypes as there, kOutOfMemory, kDevice.
  static Result<CudaGate> create(ConstTensorView weight, ConstTensorView bias);

  // x [tokens, H] of x_dtype (F32, BF16 or F16) to logits [tokens, E], device pointers as
  // launch_gate takes them. The accumulator is fp32 and is not rounded in any tier.
  // `prologue`: of an experts stage that follows, run by the same launch; null: none. Only where
  // runs_prologue says so.
  Status enqueue(void* stream, const void* x, DType x_dtype, std::int64_t tokens, float* logits,
                 const ExpertsPrologue* prologue = nullptr) const;
  bool runs_prologue(DType x_dtype, std::int64_t tokens) const;

  std::int64_t num_experts() const { return experts_; }
  std::int64_t bytes() const { return weight_.bytes() + bias_.bytes(); }

 private:
  const GatePlan& plan(DType x_dtype) const;
  GateParams params(const void* x, DType x_dtype, std::int64_t tokens, float* logits) const;
  Allocation weight_, bias_;
  DeviceTraits device_;
  GatePlan of_bf16_, of_f16_, of_f32_;  // by x_dtype
  bool weight_f32_ = false;
  std::int64_t experts_ = 0, hidden_ = 0;
};

}  // namespace moesaic::cuda
