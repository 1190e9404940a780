// What a number format of the grouped-GEMM kernel (grouped_gemm.cuh) is made of. A format is a
// struct in formats/ that picks one part of each kind; the kernel uses these parts and never tests
// which format it is. Sizes are here, for host and device; device code of the parts is in
// gemm_products.cuh and epilogue.cuh.
//
//   struct Format {
//     using Product = ...;        // type of both operands of wgmma: ptx::BF16, ptx::E4M3, ptx::S8,
//                                 ptx::F16
//     static constexpr int kChunkK = ...;      // elements of K in a chunk: 128 bytes of a token row
//     static constexpr int kWeightBits = ...;  // of one weight in the image
//     using WeightScales = ...;   // where they lie: NoWeightScales, BlockWeightScales, RowStrip<n>,
//                                 // VaryingStrip<n>
//     using Tokens = ...;         // operand rows of both GEMMs: PlainRows, HalfRows,
//                                 // GroupScaledRows, RowScaledRows, FactoredRows
//     using Weights = ...;        // how weights become an operand: FromShared, FromCodes<decoder>,
//                                 // FromFp8Codes<decoder>
//     using Promote = ...;        // when partial sums get their scales or are added up in fp32:
//                                 // InOperand, PerStage, PerStages<n>, PerStagesAndRow<n>,
//                                 // Integers
//     using Inner = ...;          // how GEMM1's result is stored: RoundBf16, RoundF16, QuantiseE4M3,
//                                 // WholeRow, GroupValues
//     using OfW2 = ...;           // where w2 has codes of its own: the format that says how these lie
//                                 // and are decoded (WeightScales, Weights); all else is alike
//   };
#pragma once

#include "cuda/quant_rows.h"

namespace moesaic::ptx {
struct E4M3;
struct BF16;
struct F16;
struct S8;
}  // namespace moesaic::ptx

namespace moesaic::cuda {

inline constexpr int kChunkBytes = 128;  // of a token row: one swizzled row of a stage
inline constexpr int kSlabRows = 128;    // weight rows of one consumer warpgroup
inline constexpr int kBandRows = 2 * kSlabRows;

// Where the scales of weights lie. kStageBytes: of an array beside the image, copied with each
// chunk of a band. kRowBytes: in the image, behind the codes of a slab, per weight row.
struct NoWeightScales {
  static constexpr int kStageBytes = 0, kRowBytes = 0;
};
// One F32 scale per 128 x 128 weights: of a band's gate and up rows or of its two slabs, padded to
// four floats.
struct BlockWeightScales {
  static constexpr int kStageBytes = 16, kRowBytes = 0;
};
// So many bytes per weight row and chunk, in the image behind the codes of a slab.
template <int kBytes>
struct RowStrip {
  static constexpr int kStageBytes = 0, kRowBytes = kBytes;
};
// The same with a size that the problem's weights decide, at most kBytes: CodeImage.
template <int kBytes>
struct VaryingStrip : RowStrip<kBytes> {
  static constexpr bool kVaries = true;
};

// The operand rows of both GEMMs. kScaleBytes: per row and chunk. kFactors: a finished sum is
// multiplied by the scale of its weight row, kTokenFactors: and of its token row (finish.cuh).
struct PlainRows {
  static constexpr RowForm kForm = RowForm::kBf16;
  static constexpr int kScaleBytes = 0;
  static constexpr bool kFactors = false, kTokenFactors = false;
};
struct HalfRows {
  static constexpr RowForm kForm = RowForm::kF16;
  static constexpr int kScaleBytes = 0;
  static constexpr bool kFactors = false, kTokenFactors = false;
};
struct FactoredRows {
  static constexpr RowForm kForm = RowForm::kBf16;
  static constexpr int kScaleBytes = 0;
  static constexpr bool kFactors = true, kTokenFactors = false;
};
struct GroupScaledRows {
  static constexpr RowForm kForm = RowForm::kFp8Group128;
  static constexpr int kScaleBytes = 4;
  static constexpr bool kFactors = false, kTokenFactors = false;
};
template <RowForm kRows>
struct RowScaledRows {
  static_assert(row_is_whole(kRows));
  static constexpr RowForm kForm = kRows;
  static constexpr int kScaleBytes = 0;
  static constexpr bool kFactors = true, kTokenFactors = true;
};

// Device code: gemm_products.cuh, gemm_codes.cuh.
struct FromShared;  // the weights of a stage are an operand as they lie there
template <class Decoder>
struct FromCodes;  // codes in fragment order, decoded into registers
template <class Decoder>
struct FromFp8Codes;  // the same for e4m3 products: gemm_fp8_codes.cuh
struct DecodeInt4Fp8;
// Device code: decode_bf16.cuh.
struct DecodeE2M1;   // e2m1 codes and E8M0 scales to bf16
struct DecodeNvfp4;  // e2m1 codes and e4m3 scales to bf16
struct DecodeMxfp8;  // e4m3 codes and E8M0 scales to bf16
// Device code: decode_codes.cuh. Scales: ScalesOfSums with PerStagesAndRow, else StripScales or
// SuperScales.
struct NibbleCodes;  // 4 bits
struct SixBitCodes;
struct ByteCodes;
template <class Codes, class Scales>
struct DecodeIntegers;  // less a zero point
template <class Scales>
struct DecodeTable;  // 4-bit indices of a table
struct DecodeE4M3;   // e4m3 codes, with ScalesOfSums
// Where a weight's scale goes: to the sums of a stage, or into the operand, for each of so many parts
// of a stage; it is stored as a number, or as an integer beside a number of all parts.
struct ScalesOfSums;
template <int kUnits, bool kRests, bool kMinima = false>
struct StripScales;
template <int kUnits, bool kMinima = false>
struct SuperScales;
struct InOperand;  // operands have their scales: one accumulator chain over all of K
struct PerStage;   // a stage's sums times the scales of its weights and tokens, added in fp32
// The sums of a stage, or of two that have the same scales, times the scale of each weight row, added
// in fp32. kMostStages: 1 or 2.
template <int kMostStages>
struct PerStagesAndRow;
template <int kStages>
struct PerStages;  // the sums of so many stages, added in fp32 as they are
struct Integers;   // 32-bit integer sums

// How GEMM1's result, activated and rounded to bf16 (RoundF16: F16), is stored as the operand rows of
// GEMM2 (epilogue.cuh): as it is, as e4m3 with a scale per row and 128 channels, with one scale per row
// (whole_rows.cuh), or as it is or, where the call says so, as the values of its codes in small
// groups, in one of these forms (value_rows.cuh).
struct RoundBf16 {
  static constexpr bool kF16 = false;
  static constexpr bool kQuantises = false, kWholeRow = false, kValues = false;
};
struct RoundF16 {
  static constexpr bool kF16 = true;
  static constexpr bool kQuantises = false, kWholeRow = false, kValues = false;
};
struct QuantiseE4M3 {
  static constexpr bool kF16 = false;
  static constexpr bool kQuantises = true, kWholeRow = false, kValues = false;
};
template <RowForm... kRows>
struct GroupValues {
  static_assert((row_has_values(kRows) && ...));
  static constexpr bool kF16 = false;
  static constexpr bool kQuantises = false, kWholeRow = false, kValues = true;
  static constexpr bool can(RowForm form) { return ((form == kRows) || ...); }
};
template <RowForm kRows>
struct WholeRow {
  static constexpr bool kF16 = false;
  static constexpr bool kQuantises = false, kWholeRow = true, kValues = false;
  static constexpr bool kInt8 = kRows == RowForm::kInt8Row;
};

// The format of w2's codes.
template <class Format>
struct FormatOfW2 {
  using Type = Format;
};
template <class Format>
requires requires { typename Format::OfW2; }
struct FormatOfW2<Format> {
  using Type = typename Format::OfW2;
  static_assert(Type::kChunkK == Format::kChunkK);
};

// What follows from a format's parts.
template <class Format>
struct FormatSizes {
  static constexpr int kRowElementBytes = row_element_bytes(Format::Tokens::kForm);
  static_assert(Format::kChunkK * kRowElementBytes == kChunkBytes);
  // Of a chunk; of the larger one of both matrices.
  template <class Own>
  static constexpr int slab_bytes() {
    return kSlabRows * (Own::kChunkK * Own::kWeightBits / 8 + Own::WeightScales::kRowBytes);
  }
  using OfW2 = typename FormatOfW2<Format>::Type;
  static constexpr int kSlabBytes = slab_bytes<OfW2>() > slab_bytes<Format>()
                                        ? slab_bytes<OfW2>()
                                        : slab_bytes<Format>();
  // GEMM2's rows are F32: rounded to F16 they could overflow where the layer's sum does not.
  static constexpr bool kWideResult = row_has_wide_result(Format::Tokens::kForm);
};

}  // namespace moesaic::cuda
