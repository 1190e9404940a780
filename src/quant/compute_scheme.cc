#include "quant/compute_scheme.h"

#include <fmt/format.h>

#include <array>
#include <optional>

namespace moesaic {
namespace {

using G = ScaleGranularity;
using F = ScaleFormat;

constexpr std::int64_t kScaleBlock = 128;  // rows and columns that share a scale

bool is_plain(const OperandQuant& q, DType dtype) {
  return q.granularity == G::kNone && q.dtype == dtype && q.table == CodeTable::kNone;
}
bool is_group(const OperandQuant& q, DType dtype, F format, std::int64_t size,
              OuterScale outer = OuterScale::kNone) {
  return q.dtype == dtype && q.granularity == G::kGroup && q.scale_format == format &&
         q.block_n == 1 && q.block_k == size && q.outer_scale == outer;
}
bool is_per(const OperandQuant& q, DType dtype, G granularity) {
  return q.dtype == dtype && q.granularity == granularity && q.scale_format == F::kF32 &&
         q.outer_scale == OuterScale::kNone;
}

// What the weights are; the integers and tables are for weight-only schemes alone.
enum class WeightFormat : std::uint8_t {
  kPlain,
  kFp8Block,
  kFp8Scaled,
  kMxfp8,
  kMxfp4,
  kNvfp4,
  kInt4Fp8,
  kInt8,
  kInteger,
  kTable,
};

bool is_integer(const OperandQuant& w) {
  const bool four = w.dtype == DType::kI4 || w.dtype == DType::kU4;
  const bool eight = w.dtype == DType::kI8 || w.dtype == DType::kU8;
  const bool grouped = w.granularity == G::kGroup && w.block_n == 1 && w.block_k > 0;
  return (four || eight) && (grouped || w.granularity == G::kChannel) &&
         w.scale_format == F::kF32 && w.outer_scale == OuterScale::kNone &&
         w.table == CodeTable::kNone;
}

// Zero points and act-order belong to integers; a table needs codes from 0.
std::optional<WeightFormat> weight_format(const OperandQuant& w) {
  if (w.dynamic) return std::nullopt;
  const bool symmetric = w.zero_point == ZeroPoint::kNone && !w.act_order;
  if (is_integer(w)) {
    const bool int8 = symmetric && w.dtype == DType::kI8 && w.granularity == G::kChannel;
    return int8 ? WeightFormat::kInt8 : WeightFormat::kInteger;
  }
  if (!symmetric) return std::nullopt;
  if (w.table != CodeTable::kNone) {
    OperandQuant codes = w;
    codes.table = CodeTable::kNone;
    const bool u4 = w.dtype == DType::kU4 && w.granularity == G::kGroup;
    return u4 && is_integer(codes) ? std::optional(WeightFormat::kTable) : std::nullopt;
  }
  if (is_plain(w, DType::kF32) || is_plain(w, DType::kBF16) || is_plain(w, DType::kF16))
    return WeightFormat::kPlain;
  if (is_per(w, DType::kF8E4M3, G::kBlock) && w.block_n == kScaleBlock && w.block_k == kScaleBlock)
    return WeightFormat::kFp8Block;
  if (is_per(w, DType::kF8E4M3, G::kTensor) || is_per(w, DType::kF8E4M3, G::kChannel))
    return WeightFormat::kFp8Scaled;
  if (is_group(w, DType::kF8E4M3, F::kE8M0, kMxGroup)) return WeightFormat::kMxfp8;
  if (is_group(w, DType::kF4E2M1, F::kE8M0, kMxGroup)) return WeightFormat::kMxfp4;
  // Per row: gate and up with global scales of their own.
  if (is_group(w, DType::kF4E2M1, F::kE4M3, 16, OuterScale::kTensor) ||
      is_group(w, DType::kF4E2M1, F::kE4M3, 16, OuterScale::kChannel))
    return WeightFormat::kNvfp4;
  if (is_group(w, DType::kI4, F::kE4M3, kScaleBlock, OuterScale::kChannel))
    return WeightFormat::kInt4Fp8;
  return std::nullopt;
}

// e4m3 per row and 128 columns, plain or power-of-two scales.
bool is_fp8_group(const OperandQuant& a) {
  return a.dynamic && (is_group(a, DType::kF8E4M3, F::kF32, kScaleBlock) ||
                       is_group(a, DType::kF8E4M3, F::kE8M0, kScaleBlock));
}

std::optional<ComputeScheme> quantised(WeightFormat w, const OperandQuant& a) {
  const bool token = is_per(a, DType::kF8E4M3, G::kToken) && a.dynamic;
  const bool fixed = is_per(a, DType::kF8E4M3, G::kTensor) && !a.dynamic;
  switch (w) {
    case WeightFormat::kFp8Block:
      if (is_fp8_group(a)) return ComputeScheme::kFp8Block;
      break;
    case WeightFormat::kFp8Scaled:
      if (token || fixed) return ComputeScheme::kFp8Scaled;
      break;
    case WeightFormat::kMxfp8:
      if (is_group(a, DType::kF8E4M3, F::kE8M0, kMxGroup) && a.dynamic &&
          a.rule == ExponentRule::kCeil)
        return ComputeScheme::kMxfp8;
      break;
    case WeightFormat::kMxfp4:
      if (is_fp8_group(a) || fixed || token) return ComputeScheme::kMxfp4Fp8;
      if (is_group(a, DType::kF4E2M1, F::kE8M0, kMxGroup) && a.dynamic &&
          a.rule == ExponentRule::kRound175)
        return ComputeScheme::kMxfp4;
      break;
    case WeightFormat::kNvfp4:
      if (is_group(a, DType::kF4E2M1, F::kE4M3, 16, OuterScale::kTensor) && a.dynamic)
        return ComputeScheme::kNvfp4;
      break;
    case WeightFormat::kInt4Fp8:
      if (token) return ComputeScheme::kInt4Fp8;
      break;
    case WeightFormat::kInt8:
      if (is_per(a, DType::kI8, G::kToken) && a.dynamic) return ComputeScheme::kInt8;
      break;
    default:
      break;
  }
  return std::nullopt;
}

}  // namespace

std::string_view compute_scheme_name(ComputeScheme scheme) {
  constexpr std::array<std::string_view, 14> kNames = {
      "f32",        "bf16",  "f16",       "fp8-block", "fp8-bf16", "mxfp4-bf16", "weight-only",
      "fp8-scaled", "mxfp8", "mxfp4-fp8", "mxfp4",     "nvfp4",    "int4-fp8",   "int8"};
  return kNames[static_cast<std::size_t>(scheme)];
}

Result<ComputeScheme> compute_scheme(const QuantScheme& quant) {
  const OperandQuant& w = quant.weight;
  const OperandQuant& a = quant.activation;
  const std::optional<WeightFormat> format = weight_format(w);
  if (!format) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("quant.weight: got {} with block {}x{}, need F32, BF16 or F16 without scales; "
                    "F8_E4M3 with an F32 scale per expert, row or 128x128 block, or an F8_E8M0 "
                    "scale per 1x32; F4 with an F8_E8M0 scale per 1x32 or an F8_E4M3 scale per "
                    "1x16 and a global one; I4, U4, I8 or U8 with F32 scales per row or group; or "
                    "I4 with an F8_E4M3 scale per 1x128 and one per row",
                    dtype_name(w.dtype), w.block_n, w.block_k));
  }
  if (is_plain(a, DType::kF32)) return ComputeScheme::kF32;
  if (*format == WeightFormat::kPlain) {
    if (is_plain(a, DType::kBF16) && w.dtype == DType::kBF16) return ComputeScheme::kBF16;
    if (is_plain(a, DType::kF16) && w.dtype == DType::kF16) return ComputeScheme::kF16;
  } else if (is_plain(a, DType::kBF16)) {
    if (*format == WeightFormat::kFp8Block) return ComputeScheme::kFp8Bf16;
    if (*format == WeightFormat::kMxfp4) return ComputeScheme::kMxfp4Bf16;
    return ComputeScheme::kWeightOnly;
  } else if (const auto scheme = quantised(*format, a)) {
    return *scheme;
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("quant: got {} weights with {} activations, need F32 activations (any "
                            "weights), BF16 (any but F32 and F16), F16 (F16 weights), or the "
                            "quantised activations of fp8-block, fp8-tensor, fp8-channel, mxfp8, "
                            "mxfp4-fp8, mxfp4, nvfp4, int4-fp8 or int8 with the weights of that "
                            "scheme",
                            dtype_name(w.dtype), dtype_name(a.dtype)));
}

}  // namespace moesaic
