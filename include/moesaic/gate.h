// GateLinear: router_logits = hidden_states . weight^T (+ bias), with the tier rules of the
// original's GateLinear. Source: spec routing.md section 1. The CPU computes every tier with fp32
// accumulation; the tier fixes dtypes and roundings, and `explain` names it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

enum class GateTier : std::uint8_t {
  kSmallBatch,
  kFp32,
  kWideningGemm,
  kFallback
};  // tiers 1 to 4
std::string_view gate_tier_name(GateTier tier);

class GateLinear {
 public:
  struct Options {
    std::optional<DType> out_dtype;  // F32 or BF16 or F16; unset: see the tier
    bool force_fp32_compute =
        false;  // weight is widened to F32 when the special tiers do not apply
    bool emulate_sm90 =
        false;  // take the tier decisions an sm_90 device would take (rounding included)
    int num_threads = 0;
  };
  // weight [E, H] F32, BF16 or F16, bias [E] or absent; both are copied.
  static Result<GateLinear> create(ConstTensorView weight, ConstTensorView bias,
                                   const Options& options);

  // One-shot: kInvalidArgument when out_dtype is already set, even to the same value.
  Status set_out_dtype(DType dtype);
  // The tier that forward would take for M tokens of this dtype.
  GateTier tier(std::int64_t num_tokens, DType hidden_dtype) const;
  // Output dtype of forward for such an input, or the error it would return.
  Result<DType> output_dtype(std::int64_t num_tokens, DType hidden_dtype) const;
  // hidden_states [M, H] (rows may be strided), router_logits [M, E] contiguous of output_dtype().
  // M = 0 is ordinary. Error vs exact: <= H * 2^-24 * sum|x*w| before the roundings that the tier
  // prescribes. Deterministic: independent of batch size and threads.
  Status forward(ConstTensorView hidden_states, TensorView router_logits) const;

  std::int64_t num_experts() const;
  std::int64_t hidden_size() const;

  GateLinear(GateLinear&&) noexcept;
  GateLinear& operator=(GateLinear&&) noexcept;
  ~GateLinear();

 private:
  struct Impl;
  explicit GateLinear(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
