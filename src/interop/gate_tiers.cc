// The kernel tiers of the original's gate.
#include <fmt/format.h>

#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/interop/routing.h"

namespace moesaic {
namespace {

// Largest M of the small-batch kernel.
constexpr std::int64_t kSmallBatchTokens = 16;

// Shapes for which the small-batch kernel is instantiated (DeepSeek-V3, Kimi-K2).
bool has_small_batch_kernel(std::int64_t num_experts, std::int64_t hidden_size) {
  return (num_experts == 256 || num_experts == 384) && hidden_size == 7168;
}

// Shapes for which the fp32 gate kernel is instantiated (MiniMax).
bool has_fp32_kernel(std::int64_t num_experts, std::int64_t hidden_size) {
  return (hidden_size == 3072 && num_experts == 256) || (hidden_size == 6144 && num_experts == 128);
}

bool device_has_special_kernels(GateDevice device) {
  if (MOESAIC_FAULT(gate_sm120_is_special) && device.sm_major == 12) return true;
  return (device.sm_major == 9 && device.sm_minor == 0) || device.sm_major == 10;
}

}  // namespace

std::string_view gate_tier_name(GateTier tier) {
  switch (tier) {
    case GateTier::kSmallBatch:
      return "small_batch";
    case GateTier::kFp32:
      return "fp32";
    case GateTier::kWideningGemm:
      return "widening_gemm";
    case GateTier::kFallback:
      return "fallback";
  }
  return "unknown";
}

GateTierRules::GateTierRules(const Problem& p)
    : sm_ok_(device_has_special_kernels(p.device)),
      special_(sm_ok_ && !p.has_bias),
      compute_dtype_(p.force_fp32_compute && !special_ ? DType::kF32 : p.weight_dtype),
      out_dtype_(p.out_dtype) {
  allow_dsv3_ = special_ && has_small_batch_kernel(p.num_experts, p.hidden_size);
  allow_fp32_ =
      special_ && compute_dtype_ == DType::kF32 && has_fp32_kernel(p.num_experts, p.hidden_size);
  allow_cublas_ = special_ && compute_dtype_ == DType::kBF16 && out_dtype_ == DType::kF32;
}

Status GateTierRules::set_out_dtype(DType dtype) {
  if (out_dtype_ && !MOESAIC_FAULT(gate_out_dtype_set_twice)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("out_dtype: got {} but {} is already set, need it set only once",
                              dtype_name(dtype), dtype_name(*out_dtype_)));
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("out_dtype", dtype));
  out_dtype_ = dtype;
  if (!allow_cublas_ && special_ && dtype == DType::kF32) {
    allow_cublas_ = compute_dtype_ == DType::kBF16;
  }
  return {};
}

GateTier GateTierRules::tier(std::int64_t num_tokens, DType hidden_dtype) const {
  const bool bf16_operands = hidden_dtype == DType::kBF16 && compute_dtype_ == DType::kBF16;
  // The original checks no dtype here; the kernel reads bf16 and writes bf16 or fp32 only.
  if (allow_dsv3_ && num_tokens <= kSmallBatchTokens && bf16_operands &&
      (!out_dtype_ || *out_dtype_ == DType::kBF16 || *out_dtype_ == DType::kF32)) {
    return GateTier::kSmallBatch;
  }
  if (allow_fp32_ && (hidden_dtype == DType::kF32 || hidden_dtype == DType::kBF16)) {
    return GateTier::kFp32;
  }
  if (allow_cublas_ && hidden_dtype == DType::kBF16) return GateTier::kWideningGemm;
  return GateTier::kFallback;
}

Result<DType> GateTierRules::output_dtype(std::int64_t num_tokens, DType hidden_dtype) const {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", hidden_dtype));
  switch (tier(num_tokens, hidden_dtype)) {
    case GateTier::kSmallBatch:
      return out_dtype_.value_or(hidden_dtype);
    case GateTier::kFp32:
    case GateTier::kWideningGemm:
      return DType::kF32;
    case GateTier::kFallback:
      break;
  }
  if (out_dtype_) return *out_dtype_;
  if (hidden_dtype != compute_dtype_) {
    return Status(
        StatusCode::kInvalidDType,
        fmt::format("hidden_states: got {}, need {} (the gate's compute dtype) unless out_dtype "
                    "is set: there is no implicit cast",
                    dtype_name(hidden_dtype), dtype_name(compute_dtype_)));
  }
  return compute_dtype_;
}

}  // namespace moesaic
