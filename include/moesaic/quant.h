// Scheme: what the numbers of weights and activations mean, and the arithmetic that follows from
// them. Data only; how to quantise is in src/quant.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "moesaic/dtype.h"
#include "moesaic/status.h"

namespace moesaic {

enum class ScaleGranularity : std::uint8_t { kNone, kTensor, kChannel, kToken, kBlock, kGroup };
// Format of the finest scales. kF32 of a weight: F32, BF16 or F16 as stored, widened when loaded.
enum class ScaleFormat : std::uint8_t { kNone, kF32, kE8M0, kE4M3 };
// How a power-of-two scale of a microscaling group is chosen from its amax (numerics/e8m0.h): amax
// / qmax rounded up; amax rounded to a power of two (up from 1.75 * 2^k) and shifted by the largest
// exponent; or floor(log2 amax) shifted so (OCP; of no scheme here). kNone with E8M0 scales: the
// e4m3 rule of quant/fp8_group.h.
enum class ExponentRule : std::uint8_t { kNone, kCeil, kRound175, kOcpFloor };
// A second, coarser F32 factor of the same operand: one per expert, or one per output row.
enum class OuterScale : std::uint8_t { kNone, kTensor, kChannel };
// What an integer code is measured from: 0; a stored integer per scale, x ~= (q - zero) * scale; or
// a stored F32 minimum per scale, x ~= q * scale - min.
enum class ZeroPoint : std::uint8_t { kNone, kInteger, kMin };
// 4-bit codes that index a table of 16 values (numerics/integer.h) instead of being numbers.
enum class CodeTable : std::uint8_t { kNone, kNf4, kFp4, kIq4Nl };

inline constexpr std::int64_t kSuperBlockColumns = 256;

// One operand of a GEMM. A scale is always a dequantisation multiplier: x ~= q * scale.
struct OperandQuant {
  DType dtype = DType::kBF16;  // of the stored elements
  ScaleGranularity granularity = ScaleGranularity::kNone;
  ScaleFormat scale_format = ScaleFormat::kNone;
  std::int64_t block_n = 0;  // rows that share a scale (block); 1 for group and token
  std::int64_t block_k = 0;  // columns (reduction axis) that share a scale (block, group)
  // Activations: scale computed at run time. Never with kTensor: a row's result would depend on the
  // rows beside it (validate refuses it).
  bool dynamic = false;
  ExponentRule rule = ExponentRule::kNone;     // activations with E8M0 scales
  OuterScale outer_scale = OuterScale::kNone;  // activations: kTensor is the static input scale
  ZeroPoint zero_point = ZeroPoint::kNone;     // weights
  CodeTable table = CodeTable::kNone;          // weights of dtype U4
  bool act_order = false;  // weights: columns are sorted by group, a permutation says from where
  // Integer weights in groups, as the k types of GGUF files: what their numbers are known to be, so
  // that a backend may hold them in fewer bits. One that holds them otherwise does not look; one that
  // meets other numbers refuses them when it loads.
  std::uint8_t code_bits = 0;  // I8: 6, all codes lie in -32 .. 31; 0: any
  // Scales (and minima) of kSuperBlockColumns columns of a row, the first at column 0, are one F16
  // number times integers: 6, 0 .. 63; 8, -128 .. 127; 0: any F32 numbers.
  std::uint8_t super_bits = 0;
  // Scales of groups in format F32 are numbers of F16 or of BF16, as files have them; kF32: any.
  DType scale_dtype = DType::kF32;
  bool operator==(const OperandQuant&) const = default;
};

// The arithmetic that a pair of operands means. All accumulate in fp32. "Quantised" operands are
// hidden states and intermediate rounded to activation_dtype first.
enum class ComputeScheme : std::uint8_t {
  kF32,  // weights of any format, exactly as stored; fp32 arithmetic, no rounding before the output
  kBF16,      // hidden states and intermediate rounded to bf16, weights bf16
  kF16,       // the same with f16
  kFp8Block,  // e4m3 weights with 128x128 scales; hidden states and intermediate quantised to e4m3
              // per row and 128 columns (scales rounded up to a power of two when their format is
              // E8M0: a backend honours that or refuses)
  kFp8AnyBlock,  // the same with weight blocks of any other size; quantised per row and block_k
                 // columns
  kFp8Bf16,      // e4m3 weights with 128x128 scales; hidden states and intermediate rounded to bf16
  kMxfp4Bf16,    // e2m1 weights with a power-of-two scale per row and 32 columns; hidden states and
                 // intermediate rounded to bf16
  kWeightOnly,   // every other quantised weight format; hidden states and intermediate rounded to
                 // bf16, entries of a code table rounded to bf16
  kFp8Scaled,  // e4m3 with one scale per expert or per output row; quantised to e4m3 with one scale
               // per row (dynamic), or the expert's static one
  kMxfp8,      // e4m3 with a power-of-two scale per 32; quantised the same way (scale: CEIL)
  kMxfp4Fp8,   // e2m1 with a power-of-two scale per 32; e4m3 per 128 columns, row or tensor
  kMxfp4,      // the same weights; quantised to e2m1 per 32 (scale: ROUND@1.75)
  kNvfp4,      // e2m1 with an e4m3 scale per 16 and a global one; quantised the same way, with a
               // static global scale
  kInt4Fp8,    // int4 times an e4m3 scale per 128, that product rounded to e4m3; a scale per output
               // row; activations as kFp8Scaled has them
  kInt8,       // int8 with a scale per output row; quantised to int8 with one scale per row
  kInt8Group,  // integers of 4 or 8 bits with scales per group or row, zero points or minima, or
               // MXFP4; quantised to int8 per row and group of columns
  kNone,       // no stage computes this pair of operands
};
// "fp8-block" ...: the name of the scheme it was made for, or "weight-only", "fp8-scaled", "none";
// "unknown" for a value outside the enumeration.
std::string_view compute_scheme_name(ComputeScheme kind);

// What the numbers of each matrix are known to be, where w13 (gate and up) and w2 of an expert are
// stored in formats of their own, as most GGUF files have them (Q4_K beside Q6_K): integers or
// indices of Scheme::weight, in which both are handed over, that fit a narrower format too: fewer
// bits of codes, groups that are neighbours and have equal numbers, no minima where all are 0. As
// with OperandQuant::code_bits, a backend that holds a matrix otherwise does not look, and one that
// meets other numbers refuses them when it loads (kInvalidArgument). What is computed is the same.
struct MatrixForms {
  OperandQuant w13, w2;
  bool operator==(const MatrixForms&) const = default;
};

// Weights and activations of one layer, and what is computed with them. Made by make_scheme alone,
// from the operands and never from the name, so that a scheme put together by hand means the same.
// An operand that is changed afterwards may mean another `kind`: validate refuses that.
struct Scheme {
  std::string_view name;  // static storage; the --quant name of the command line
  OperandQuant weight;
  OperandQuant activation;
  // Upper bound on the relative L2 error of a layer's output against float64 arithmetic on the
  // *same stored weights* (activation quantisation included). docs/accuracy.md has the measurements
  // behind it.
  double output_bound = 0;
  ComputeScheme kind = ComputeScheme::kBF16;        // that of the default operands
  std::optional<MatrixForms> forms = std::nullopt;  // empty: nothing is known
  bool weight_only() const { return activation.granularity == ScaleGranularity::kNone; }
};

// Always succeeds: a checkpoint may store what nothing here computes, and can be described all the
// same. `kind` is kNone then.
Scheme make_scheme(std::string_view name, const OperandQuant& weight,
                   const OperandQuant& activation, double output_bound);
// The same scheme with another operand, name and bound kept. Forms are those of the weights:
// with_weight has none.
Scheme with_weight(const Scheme& scheme, const OperandQuant& weight);
Scheme with_activation(const Scheme& scheme, const OperandQuant& activation);
// The same scheme with activation scales of another format, F32 or kE8M0 (rounded up to a power of
// two), whatever the checkpoint says: where activations are quantised to e4m3 per group of 128, or
// of as many columns as the weights' blocks have.
// kUnsupported for any other scheme or format.
Result<Scheme> with_activation_scales(const Scheme& scheme, ScaleFormat format);
// What becomes of activations, for people: "F8_E4M3, one scale per token".
std::string activation_text(const Scheme& scheme);
// kUnsupported when no stage computes these operands (which operand, and what is possible);
// kInvalidArgument when `kind` is not what the operands mean, or a form does not fit the weights.
Status validate(const Scheme& scheme);

// The schemes this build knows, in the order of docs/accuracy.md: f32, bf16, f16, fp8-block,
// fp8-bf16, ... A checkpoint may imply others (other group sizes, zero points, static input
// scales): those are the nearest of these with other operands.
std::span<const Scheme> quant_schemes();
// The same scheme with weights of a checkpoint and what is known of them, where its activations
// follow the weights: int8 per group (kInt8Group) takes the weights' group, with forms that of the
// coarser one, at most 128 columns, at least 16; all others stay.
Scheme with_stored_weight(const Scheme& scheme, const OperandQuant& weight,
                          const std::optional<MatrixForms>& forms = std::nullopt);
// The name of the scheme that quantises activations to int8 per group beside such weights; empty for
// weights that are neither integers of 4 or 8 bits with F32 scales nor MXFP4.
std::string_view int8_group_scheme_of(const OperandQuant& weight);

// What checkpoints hold besides, under names of its own: fp8-static, int4-g32, uint4-g128 (zero
// points), q4_k ... Weights are computed as such but never converted to them; the names are those of
// random weights (bench), with the bounds of the nearest of the schemes above.
std::span<const Scheme> stored_schemes();
// One of quant_schemes(). kNotFound (with the nearest known name) for any other.
Result<Scheme> quant_scheme_from_name(std::string_view name);

}  // namespace moesaic
