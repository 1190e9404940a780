// GateLinear on a Hopper GPU: weight and bias on the device, sums in fp32 whatever the dtypes.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/experts_prologue.h"
#include "gate/rounding.h"
#include "gate/sm90/gate.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::cuda {

// `count` fp32 logits on the current device, rounded into `to` of to_dtype: F32 (may be `from`), or
// rounding.logits. No launch where nothing would change.
Status round_logits(const float* from, std::int64_t count, const gate::LogitRounding& rounding,
                    void* to, DType to_dtype, void* stream);

class CudaGate {
 public:
  // Host tensors as GateLinear::create takes them; copied to the current device. F32 and F16 weights
  // as bf16 where all values are bf16 numbers; else as sums of two or three for bf16 rows, and as F32
  // for others. Where rows of F16 are to be expected (weights or rows_dtype, the model's, are F16) as
  // F16 besides, if all values are such numbers. `rounding`: what every call does to its logits,
  // which stay fp32 numbers, by one kernel more behind the gate's. Errors: shapes and dtypes as
  // there, kOutOfMemory, kDevice.
  static Result<CudaGate> create(ConstTensorView weight, ConstTensorView bias,
                                 const gate::LogitRounding& rounding = {},
                                 DType rows_dtype = DType::kBF16);

  // x [tokens, H] of x_dtype (F32, BF16 or F16) to logits [tokens, E], device pointers as
  // launch_gate takes them. The accumulator is fp32 and is not rounded in any tier.
  // `prologue`: of an experts stage that follows, run by the same launch; null: none. Only where
  // runs_prologue says so: never with a rounding, which comes between. check_linear_input's errors.
  // `row_factors` [tokens], not with a prologue: each row's logits are multiplied with its factor
  // before the bias is added (one kernel more); null: with 1.
  Status enqueue(void* stream, const void* x, DType x_dtype, std::int64_t tokens, float* logits,
                 const ExpertsPrologue* prologue = nullptr,
                 const float* row_factors = nullptr) const;
  bool runs_prologue(DType x_dtype, std::int64_t tokens) const;

  std::int64_t num_experts() const { return experts_; }
  std::int64_t bytes() const {
    return weight_.bytes() + half_.bytes() + wide_.bytes() + bias_.bytes();
  }

 private:
  Status upload_half(const std::vector<float>& values);
  const GatePlan& plan(DType x_dtype) const;
  GateParams params(const void* x, DType x_dtype, std::int64_t tokens, float* logits) const;
  Allocation weight_, half_, wide_, bias_;  // bf16, F16, F32
  DeviceTraits device_;
  GatePlan of_bf16_, of_f16_, of_f32_;  // by x_dtype
  gate::LogitRounding rounding_;
  int parts_ = 1;  // of weight_; 0: there is none
  std::int64_t experts_ = 0, hidden_ = 0;
};

}  // namespace moesaic::cuda
