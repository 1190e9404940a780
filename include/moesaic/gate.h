// GateLinear: router_logits = hidden_states . weight^T (+ bias), with the tier rules of the
// original's GateLinear. Source: docs/spec/routing.md section 1. The CPU computes every tier with
// fp32 accumulation; the tier fixes dtypes and roundings, and `explain` names it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// What each tier does to dtypes (x: hidden states, W: the gate's compute dtype, see
// Options::force_fp32_compute). Tiers 1 to 3 belong to devices with small-batch and widening GEMM
// kernels (sm_90, sm_10x); a plain CPU always takes the fallback.
enum class GateTier : std::uint8_t {
  kSmallBatch,    // 1: bf16 x and W, M <= 16; one rounding to out_dtype (unset: BF16)
  kFp32,          // 2: fp32 W; logits F32 whatever out_dtype says
  kWideningGemm,  // 3: bf16 x and W; the fp32 accumulator is the logit
  kFallback       // 4: logits rounded to W's dtype, then converted to out_dtype
};                // tiers 1 to 4
std::string_view gate_tier_name(
    GateTier tier);  // "small_batch", "fp32", "widening_gemm", "fallback"

class GateLinear {
 public:
  struct Options {
    std::optional<DType> out_dtype;  // F32 or BF16 or F16; unset: see the tier
    // Compute as if the weight were stored in F32 when the special tiers do not apply, so that
    // logits keep the accuracy of their fp32 accumulators (on a plain CPU: always). Without it a
    // bf16 weight makes the fallback round each logit to bf16, which can turn a near-tie around.
    // Costs no memory: the weight is widened in registers.
    bool force_fp32_compute = false;
    // Take the tier decisions an sm_90 device would take (rounding included).
    bool emulate_sm90 = false;
    int num_threads = 0;  // at most; 0: as many as OpenMP would use
  };
  // weight [E, H] F32, BF16 or F16, contiguous; bias [E] of one of these dtypes, or absent; both
  // are copied. The bias is added to the fp32 accumulator before any rounding. Errors:
  // kInvalidShape, kInvalidDType, kInvalidLayout, kInvalidArgument (null data, negative
  // num_threads), kOutOfMemory.
  static Result<GateLinear> create(ConstTensorView weight, ConstTensorView bias,
                                   const Options& options);

  // One-shot: kInvalidArgument when out_dtype is already set, even to the same value;
  // kInvalidDType for anything but F32, BF16, F16. Setting F32 may open tier 3.
  Status set_out_dtype(DType dtype);
  // The tier that forward would take for M tokens of this dtype.
  GateTier tier(std::int64_t num_tokens, DType hidden_dtype) const;
  // Output dtype of forward for such an input, or the error it would return: kInvalidDType when
  // hidden_dtype is not F32, BF16 or F16, or when it differs from the gate's compute dtype in the
  // fallback tier and out_dtype is unset (no implicit cast).
  Result<DType> output_dtype(std::int64_t num_tokens, DType hidden_dtype) const;
  // hidden_states [M, H] (rows may be strided), router_logits [M, E] contiguous of output_dtype(),
  // not overlapping hidden_states. M = 0 is ordinary. Error vs exact: <= (H + 1) * 2^-24 *
  // (sum|x*w| + |bias|) before the roundings that the tier prescribes (in the fallback tier x too
  // is first rounded to the compute dtype when the dtypes differ). NaN and infinity propagate as
  // IEEE arithmetic has it. Deterministic: independent of batch size, row strides and threads;
  // the SIMD instruction set may change the last bits. Allocates nothing, except a chunk of
  // rounded rows when the fallback tier has to round x (kOutOfMemory).
  // Errors: kInvalidShape, kInvalidDType, kInvalidLayout, kInvalidArgument (null data), kAliasing.
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
