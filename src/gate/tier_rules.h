// The tier state machine of GateLinear as a value: which of the four tiers a call takes and which
// dtype it returns, for any device, without the device. Source: docs/spec/routing.md section 1.
#pragma once

#include <cstdint>
#include <optional>

#include "moesaic/dtype.h"
#include "moesaic/gate.h"
#include "moesaic/status.h"

namespace moesaic {

// A CUDA device by its compute capability, or a CPU (no capability).
struct GateDevice {
  int sm_major = 0;
  int sm_minor = 0;
  static constexpr GateDevice cpu() { return {}; }
  static constexpr GateDevice cuda(int major, int minor) { return {major, minor}; }
  bool operator==(const GateDevice&) const = default;
};

class GateTierRules {
 public:
  struct Problem {
    GateDevice device;
    DType weight_dtype = DType::kBF16;  // params_dtype: as created, before force_fp32_compute
    std::int64_t num_experts = 0;       // E
    std::int64_t hidden_size = 0;       // H
    bool has_bias = false;
    std::optional<DType> out_dtype;
    bool force_fp32_compute = false;
  };
  explicit GateTierRules(const Problem& problem);

  // Device has the special kernels: capability exactly 9.0 or family 10.x. Family 12.x has not.
  bool sm_ok() const { return sm_ok_; }
  bool special() const { return special_; }  // sm_ok and no bias
  // Dtype the linear computes in: F32 when forced and not special, else weight_dtype.
  DType compute_dtype() const { return compute_dtype_; }
  bool allow_dsv3() const { return allow_dsv3_; }      // tier 1
  bool allow_fp32() const { return allow_fp32_; }      // tier 2
  bool allow_cublas() const { return allow_cublas_; }  // tier 3
  std::optional<DType> out_dtype() const { return out_dtype_; }

  // kInvalidArgument when out_dtype is set already, even to the same value; kInvalidDType unless
  // F32, BF16 or F16 (nothing is stored then). Recomputes allow_cublas only, and only from false.
  Status set_out_dtype(DType dtype);

  // The first tier whose conditions hold. M is looked at on every call, never frozen.
  GateTier tier(std::int64_t num_tokens, DType hidden_dtype) const;
  // Dtype of the logits, or kInvalidDType (see GateLinear::output_dtype).
  Result<DType> output_dtype(std::int64_t num_tokens, DType hidden_dtype) const;

 private:
  bool sm_ok_ = false;
  bool special_ = false;
  bool allow_dsv3_ = false;
  bool allow_fp32_ = false;
  bool allow_cublas_ = false;
  DType compute_dtype_ = DType::kBF16;
  std::optional<DType> out_dtype_;
};

// F32, BF16 or F16: what a gate reads and writes.
bool is_gate_dtype(DType dtype);

}  // namespace moesaic
