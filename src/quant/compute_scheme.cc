#include "quant/compute_scheme.h"

#include <fmt/format.h>

#include <array>

namespace moesaic {
namespace {

constexpr std::int64_t kBlock = 128;  // rows and columns that share a scale

bool is_plain(const OperandQuant& q, DType dtype) {
  return q.granularity == ScaleGranularity::kNone && q.dtype == dtype;
}
bool is_plain_float(const OperandQuant& q) {
  return is_plain(q, DType::kF32) || is_plain(q, DType::kBF16) || is_plain(q, DType::kF16);
}
bool is_fp8_block(const OperandQuant& q) {
  return q.dtype == DType::kF8E4M3 && q.granularity == ScaleGranularity::kBlock &&
         q.scale_format == ScaleFormat::kF32 && q.block_n == kBlock && q.block_k == kBlock &&
         !q.dynamic;
}
bool is_mxfp4(const OperandQuant& q) {
  return q.dtype == DType::kF4E2M1 && q.granularity == ScaleGranularity::kGroup &&
         q.scale_format == ScaleFormat::kE8M0 && q.block_n == 1 && q.block_k == kMxGroup &&
         !q.dynamic;
}
bool is_fp8_group(const OperandQuant& q) {
  return q.dtype == DType::kF8E4M3 && q.granularity == ScaleGranularity::kGroup &&
         (q.scale_format == ScaleFormat::kF32 || q.scale_format == ScaleFormat::kE8M0) &&
         q.block_k == kBlock && q.dynamic;
}

}  // namespace

std::string_view compute_scheme_name(ComputeScheme scheme) {
  constexpr std::array<std::string_view, 6> kNames = {"f32",       "bf16",     "f16",
                                                      "fp8-block", "fp8-bf16", "mxfp4-bf16"};
  return kNames[static_cast<std::size_t>(scheme)];
}

Result<ComputeScheme> compute_scheme(const QuantScheme& quant) {
  const OperandQuant& w = quant.weight;
  const OperandQuant& a = quant.activation;
  const bool fp8 = is_fp8_block(w);
  const bool mxfp4 = is_mxfp4(w);
  if (!fp8 && !mxfp4 && !is_plain_float(w)) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("quant.weight: got {} with block {}x{}, need F32, BF16 or F16 "
                              "without scales, or F8_E4M3 "
                              "with an F32 scale per 128x128 block, or F4 with an F8_E8M0 scale "
                              "per 1x32",
                              dtype_name(w.dtype), w.block_n, w.block_k));
  }
  if (is_plain(a, DType::kF32)) return ComputeScheme::kF32;
  if (is_plain(a, DType::kBF16) && fp8) return ComputeScheme::kFp8Bf16;
  if (is_plain(a, DType::kBF16) && mxfp4) return ComputeScheme::kMxfp4Bf16;
  if (is_plain(a, DType::kBF16) && w.dtype == DType::kBF16) return ComputeScheme::kBF16;
  if (is_plain(a, DType::kF16) && w.dtype == DType::kF16) return ComputeScheme::kF16;
  if (is_fp8_group(a) && fp8) return ComputeScheme::kFp8Block;
  return Status(StatusCode::kUnsupported,
                fmt::format("quant: got {} weights with {} activations, need f32 (any weights), "
                            "bf16, f16, fp8-block, "
                            "fp8-bf16 or mxfp4-bf16",
                            dtype_name(w.dtype), dtype_name(a.dtype)));
}

}  // namespace moesaic
