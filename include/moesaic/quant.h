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
// Of the finest scales. kF32 as a weight scale: F32, BF16 or F16 as stored, widened when loaded.
enum class ScaleFormat : std::uint8_t { kNone, kF32, kE8M0, kE4M3 };
// How a power-of-two scale of microscaling activations is chosen from a group's amax
// (numerics/e8m0.h): amax / qmax rounded up, or amax rounded to a power of two (up from 1.75 * 2^k)
// and shifted by the largest exponent. kNone with E8M0 scales: the e4m3 rule of quant/fp8_group.h.
enum class ExponentRule : std::uint8_t { kNone, kCeil, kRound175 };
// A second, coarser F32 factor of the same operand: one per expert, or one per output row.
enum class OuterScale : std::uint8_t { kNone, kTensor, kChannel };
// What an integer code is measured from: 0; a stored integer per scale, x ~= (q - zero) * scale; or
// a stored F32 minimum per scale, x ~= q * scale - min.
enum class ZeroPoint : std::uint8_t { kNone, kInteger, kMin };
// 4-bit codes that index a table of 16 values (numerics/integer.h) instead of being numbers.
enum class CodeTable : std::uint8_t { kNone, kNf4, kFp4, kIq4Nl };

// One operand of a GEMM. A scale is always a dequantisation multiplier: x ~= q * scale.
struct OperandQuant {
  DType dtype = DType::kBF16;  // of the stored elements
  ScaleGranularity granularity = ScaleGranularity::kNone;
  ScaleFormat scale_format = ScaleFormat::kNone;
  std::int64_t block_n = 0;  // rows that share a scale (block); 1 for group and token
  std::int64_t block_k = 0;  // columns (reduction axis) that share a scale (block, group)
  bool dynamic = false;      // activations: scale computed at run time
  ExponentRule rule = ExponentRule::kNone;     // activations with E8M0 scales
  OuterScale outer_scale = OuterScale::kNone;  // activations: kTensor is the static input scale
  ZeroPoint zero_point = ZeroPoint::kNone;     // weights
  CodeTable table = CodeTable::kNone;          // weights of dtype U4
  bool act_order = false;  // weights: columns are sorted by group, a permutation says from where
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
// fp8-bf16, ... A checkpoint may imply others (other group sizes, zero points, static input
// scales): those are the nearest of these with other operands.
std::span<const QuantScheme> quant_schemes();
// kNotFound (with the nearest known name) for any other.
Result<QuantScheme> quant_scheme_from_name(std::string_view name);

}  // namespace moesaic
