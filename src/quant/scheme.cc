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

// e4m3 with one F32 scale per 128x128 tile: the block format of DeepSeek-V3 checkpoints.
constexpr OperandQuant fp8_block_weight() {
  OperandQuant q;
  q.dtype = DType::kF8E4M3;
  q.granularity = ScaleGranularity::kBlock;
  q.scale_format = ScaleFormat::kF32;
  q.block_n = 128;
  q.block_k = 128;
  return q;
}

// e4m3 with one F32 scale per row and 128 columns, computed from the data at run time.
constexpr OperandQuant fp8_group_activation() {
  OperandQuant q;
  q.dtype = DType::kF8E4M3;
  q.granularity = ScaleGranularity::kGroup;
  q.scale_format = ScaleFormat::kF32;
  q.block_n = 1;
  q.block_k = 128;
  q.dynamic = true;
  return q;
}

// e2m1 with one power-of-two scale per row and 32 columns (OCP MXFP4).
constexpr OperandQuant mxfp4_weight() {
  OperandQuant q;
  q.dtype = DType::kF4E2M1;
  q.granularity = ScaleGranularity::kGroup;
  q.scale_format = ScaleFormat::kE8M0;
  q.block_n = 1;
  q.block_k = 32;
  return q;
}

// Bounds are for a whole expert MLP with shared experts, against float64 on the same stored
// weights. f32: accumulation order only. bf16, f16 and the weight-only schemes: the rounding of
// inputs, intermediate and output to 8 or 11 significand bits, twice over. fp8-block: 2.6 % per
// e4m3 activation rounding, at both GEMMs.
constexpr std::array<QuantScheme, 6> kSchemes = {{
    {"f32", plain(DType::kF32), plain(DType::kF32), 2e-6},
    {"bf16", plain(DType::kBF16), plain(DType::kBF16), 6e-3},
    {"f16", plain(DType::kF16), plain(DType::kF16), 1e-3},
    {"fp8-block", fp8_block_weight(), fp8_group_activation(), 6e-2},
    {"fp8-bf16", fp8_block_weight(), plain(DType::kBF16), 6e-3},
    {"mxfp4-bf16", mxfp4_weight(), plain(DType::kBF16), 6e-3},
}};

// Names that the command line reserves; they get an answer of their own.
constexpr std::array<std::string_view, 10> kReserved = {
    "fp8-tensor", "fp8-channel", "mxfp8", "mxfp4-fp8", "mxfp4",
    "nvfp4",      "int4-fp8",    "int8",  "int4-g128", "nvfp4-bf16",
};

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
  for (const std::string_view reserved : kReserved) {
    if (reserved == name) {
      return Status(StatusCode::kUnsupported, "quant scheme: \"" + std::string(name) +
                                                  "\" is not in this version, need one of " +
                                                  known_names());
    }
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
