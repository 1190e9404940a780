// GateLinear: router_logits = hidden_states . weight^T (+ bias), accumulated in fp32 whatever the
// dtypes, then rounded as the options say. Source: docs/spec/routing.md section 1; the kernel tiers that the original chooses
// on a device, with their roundings, are in interop/routing.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "moesaic/device.h"
#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

class GateLinear {
 public:
  struct Options {
    // F32, BF16 or F16: what forward writes. F32 keeps the linear's result as it is; the others
    // round each logit to nearest even, which can turn a near-tie around. Unset: the linear's own
    // dtype, until set_logits_dtype is called.
    std::optional<DType> logits_dtype = DType::kF32;
    // true: the linear is fp32, its accumulators go to logits_dtype directly. false: the linear is
    // of the weight's dtype, as in a framework whose linear returns what it is given: each
    // accumulator (bias included) is rounded to the weight's dtype first, then to logits_dtype.
    // Both round to nearest even. The same thing for an F32 weight.
    bool force_fp32_compute = true;
    // At most; 0: one per core this process may use (its affinity mask when the gate is made).
    int num_threads = 0;
    // Where a call's tensors are, and who computes.
    Device device = Device::cpu();
  };
  // weight [E, H] F32, BF16 or F16, contiguous; bias [E] of one of these dtypes, or absent; both
  // are copied. Runs on the SIMD tier that experts take too: the fastest of this machine, or the one
  // named by the environment variable MOESAIC_CPU_TIER. Errors: kInvalidShape, kInvalidDType,
  // kInvalidLayout, kInvalidArgument (null data, negative num_threads), kNotFound, kUnsupported
  // (MOESAIC_CPU_TIER), kOutOfMemory.
  static Result<GateLinear> create(ConstTensorView weight, ConstTensorView bias,
                                   const Options& options);

  // hidden_states [M, H] F32, BF16 or F16 (rows may be strided), router_logits [M, E] contiguous of
  // logits_dtype(), not overlapping hidden_states. M = 0 is ordinary. The bias is added to the fp32
  // accumulator before any rounding. Error vs exact: <= (H + 1) * 2^-24 * (sum|x*w| + |bias|) before
  // the roundings of the options. NaN and infinity propagate as IEEE arithmetic has it.
  // Deterministic: independent of batch size, row strides and threads; the SIMD instruction set may
  // change the last bits. Allocates nothing.
  // Without force_fp32_compute rows are not rounded to the weight's dtype: they have it (kUnsupported
  // else), or the weight is F32; with logits_dtype unset they have it in any case (kInvalidDType).
  // Errors: kInvalidShape, kInvalidDType, kInvalidLayout, kInvalidArgument (null data), kAliasing,
  // kLimitExceeded (sizes, strides), kUnsupported.
  // On a GPU: the error is within (H / 32 + 64) * 2^-24 * sum|x*w|. Of bf16 rows and weights that are
  // not all bf16 numbers it is within (3 H / 32 + 64) * 2^-24 * (1 + 2^-7) * sum|x*w|, and an infinite
  // hidden state may give NaN for infinity. Launched on `stream`, not done when this returns; may be
  // captured. Contiguous rows are 16-byte aligned; rows at least H elements apart are copied first,
  // to the device's stream-ordered memory pool, and logits of 16 bits go through M * E floats of it
  // (kOutOfMemory).
  Status forward(ConstTensorView hidden_states, TensorView router_logits, Stream stream = {}) const;
  // forward on a GPU that takes no memory (for contiguous rows): the floats of 16-bit logits are in
  // `workspace`, at least workspace_size(M) bytes of the device, 256-byte aligned, until the work is
  // done.
  // kWorkspaceTooSmall; kUnsupported on the CPU.
  Status enqueue(Stream stream, ConstTensorView hidden_states, TensorView router_logits,
                 std::span<std::byte> workspace) const;
  // For M tokens and the dtype that logits have now; 0 on the CPU and for F32. kInvalidArgument for
  // negative tokens, kLimitExceeded.
  Result<std::int64_t> workspace_size(std::int64_t tokens) const;

  // Sets Options::logits_dtype where it was unset, between calls. kInvalidArgument when it is set,
  // even to the same dtype; kInvalidDType unless F32, BF16 or F16.
  Status set_logits_dtype(DType dtype);

  std::int64_t num_experts() const;
  std::int64_t hidden_size() const;
  DType logits_dtype() const;  // of what forward writes now
  Device device() const;

  GateLinear(GateLinear&&) noexcept;
  GateLinear& operator=(GateLinear&&) noexcept;
  ~GateLinear();

 private:
  struct Impl;
  explicit GateLinear(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
