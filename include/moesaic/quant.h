// QuantScheme: what the numbers of weights and activations mean. Data only; how to quantise is in
// src/quant.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "moesaic/dtype.h"
#include "moesaic/status.h"

namespace moesaic {

enum class ScaleGranularity : std::uint8_t { kNone, kTensor, kChannel, kToken, kBlock, kGroup };
enum class ScaleFormat : std::uint8_t { kNone, kF32, kE8M0, kE4M3 };

// One operand of a GEMM. A scale is always a dequantisation multiplier: x ~= q * scale.
struct OperandQuant {
  DType dtype = DType::kBF16;  // of the stored elements
  ScaleGranularity granularity = ScaleGranularity::kNone;
  ScaleFormat scale_format = ScaleFormat::kNone;
  std::int64_t block_n = 0;  // rows that share a scale (block); 1 for group and token
  std::int64_t block_k = 0;  // columns (reduction axis) that share a scale (block, group)
  bool dynamic = false;      // activations: scale computed at run time
  bool operator==(const OperandQuant&) const = default;
};

// Weights and activations of one layer. `name` is the --quant name of the command line.
struct QuantScheme {
  std::string_view name;  // static storage
  OperandQuant weight;
  OperandQuant activation;
  // Upper bound on the relative L2 error of a layer's output against float64 arithmetic on the
  // *same stored weights* (activation quantisation included). docs/accuracy.md has the measurements
  // behind it.
  double output_bound = 0;
  bool weight_only() const { return activation.granularity == ScaleGranularity::kNone; }
};

// The schemes this build knows, in the order of docs/accuracy.md: f32, bf16, f16, fp8-block,
// fp8-bf16, ...
std::span<const QuantScheme> quant_schemes();
// kUnsupported for a name that the command line reserves but this build lacks, kNotFound (with the
// nearest known name) for any other.
Result<QuantScheme> quant_scheme_from_name(std::string_view name);

}  // namespace moesaic
