#include <array>
#include <string>
#include <vector>

#include "core/nearest_name.h"
#include "moesaic/quant.h"

namespace moesaic {
namespace {

constexpr OperandQuant plain(DType dtype) {
  OperandQuant q;
  q.dtype = dtype;
  return q;
}

constexpr OperandQuant scaled(DType dtype, ScaleGranularity granularity, ScaleFormat format,
                              std::int64_t block_n = 0, std::int64_t block_k = 0) {
  OperandQuant q = plain(dtype);
  q.granularity = granularity;
  q.scale_format = format;
  q.block_n = block_n;
  q.block_k = block_k;
  return q;
}
constexpr OperandQuant group(DType dtype, ScaleFormat format, std::int64_t block_k) {
  return scaled(dtype, ScaleGranularity::kGroup, format, 1, block_k);
}
constexpr OperandQuant outer(OperandQuant q, OuterScale scale) {
  q.outer_scale = scale;
  return q;
}
// Activations: scales computed from the data at run time.
constexpr OperandQuant dynamic(OperandQuant q, ExponentRule rule = ExponentRule::kNone) {
  q.dynamic = true;
  q.rule = rule;
  return q;
}
constexpr OperandQuant token(DType dtype) {
  return dynamic(scaled(dtype, ScaleGranularity::kToken, ScaleFormat::kF32));
}
constexpr OperandQuant table(OperandQuant q, CodeTable values) {
  q.table = values;
  return q;
}

constexpr DType kE4M3 = DType::kF8E4M3, kE2M1 = DType::kF4E2M1, kInt8 = DType::kI8;
constexpr OperandQuant kBF16 = plain(DType::kBF16);
// e4m3 with one F32 scale per 128x128 tile: the block format of DeepSeek-V3 checkpoints.
constexpr OperandQuant kFp8Block =
    scaled(kE4M3, ScaleGranularity::kBlock, ScaleFormat::kF32, 128, 128);
constexpr OperandQuant kFp8Tensor = scaled(kE4M3, ScaleGranularity::kTensor, ScaleFormat::kF32);
constexpr OperandQuant kFp8Channel = scaled(kE4M3, ScaleGranularity::kChannel, ScaleFormat::kF32);
constexpr OperandQuant kInt8Channel = scaled(kInt8, ScaleGranularity::kChannel, ScaleFormat::kF32);
constexpr OperandQuant kMxfp8 = group(kE4M3, ScaleFormat::kE8M0, 32);  // OCP microscaling
constexpr OperandQuant kMxfp4 = group(kE2M1, ScaleFormat::kE8M0, 32);
constexpr OperandQuant kNvfp4 = outer(group(kE2M1, ScaleFormat::kE4M3, 16), OuterScale::kTensor);
constexpr OperandQuant kInt4Fp8 =
    outer(group(DType::kI4, ScaleFormat::kE4M3, 128), OuterScale::kChannel);

// Bounds are for a whole expert MLP with shared experts, against float64 on the same stored
// weights. f32: accumulation order only. bf16, f16 and the weight-only schemes: the rounding of
// inputs, intermediate and output to 8 or 11 significand bits, twice over. Quantised activations,
// at both GEMMs: 2.6 % per rounding to e4m3, 0.8 % to int8 of a whole row, 11 % to e2m1 with
// power-of-two scales, 9.5 % with e4m3 scales per 16 (spec quantization.md section 15), and margin.
constexpr double kWeightOnly = 6e-3, kFp8 = 6e-2;
constexpr std::array<QuantScheme, 18> kSchemes = {{
    {"f32", plain(DType::kF32), plain(DType::kF32), 2e-6},
    {"bf16", kBF16, kBF16, kWeightOnly},
    {"f16", plain(DType::kF16), plain(DType::kF16), 1e-3},
    {"fp8-block", kFp8Block, dynamic(group(kE4M3, ScaleFormat::kF32, 128)), kFp8},
    {"fp8-bf16", kFp8Block, kBF16, kWeightOnly},
    {"mxfp4-bf16", kMxfp4, kBF16, kWeightOnly},
    {"fp8-tensor", kFp8Tensor, token(kE4M3), kFp8},
    {"fp8-channel", kFp8Channel, token(kE4M3), kFp8},
    {"mxfp8", kMxfp8, dynamic(kMxfp8, ExponentRule::kCeil), kFp8},
    {"mxfp4-fp8", kMxfp4, dynamic(group(kE4M3, ScaleFormat::kE8M0, 128)), kFp8},
    {"mxfp4", kMxfp4, dynamic(kMxfp4, ExponentRule::kRound175), 0.3},
    {"nvfp4", kNvfp4, dynamic(kNvfp4), 0.25},
    {"int4-fp8", kInt4Fp8, token(kE4M3), kFp8},
    {"int8", kInt8Channel, token(kInt8), 3e-2},
    {"int4-g128", group(DType::kI4, ScaleFormat::kF32, 128), kBF16, kWeightOnly},
    {"int8-bf16", kInt8Channel, kBF16, kWeightOnly},
    {"nvfp4-bf16", kNvfp4, kBF16, kWeightOnly},
    {"nf4-bf16", table(group(DType::kU4, ScaleFormat::kF32, 64), CodeTable::kNf4), kBF16,
     kWeightOnly},
}};

std::string known_names() {
  std::string text;
  for (const QuantScheme& scheme : kSchemes) {
    if (!text.empty()) text += ", ";
    text += scheme.name;
  }
  return text;
}

}  // namespace

std::span<const QuantScheme> quant_schemes() { return kSchemes; }

Result<QuantScheme> quant_scheme_from_name(std::string_view name) {
  for (const QuantScheme& scheme : kSchemes) {
    if (scheme.name == name) return scheme;
  }
  std::vector<std::string_view> names;
  names.reserve(kSchemes.size());
  for (const QuantScheme& scheme : kSchemes) names.push_back(scheme.name);
  // The name comes from outside: quote a bounded part of it.
  return Status(StatusCode::kNotFound, "quant scheme: got \"" + std::string(name.substr(0, 64)) +
                                           "\", need one of " + known_names() + "; nearest is \"" +
                                           std::string(nearest_name(name, names)) + "\"");
}

}  // namespace moesaic
