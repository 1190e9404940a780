// Blocks of GGUF files: decoding every type that the reader takes. The file container is not here. All types but the plain ones mean value = scale * code - min with a small
// integer code (the fp4 types by doubling the code and halving the scale, the IQ4 types by taking
// the table's values for codes), so one decoder serves dequantisation and the weight-only backends.
// Source: block layouts of ggml; spec of each type beside its decoder (gguf_decoders.cc).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Elements of the plain blocks, which are also the groups of a scale in most types; of the finer
// groups of Q2_K, Q3_K and Q6_K; and of the blocks of the k types.
inline constexpr int kGgufBlock = 32, kGgufHalfBlock = 16, kGgufSuperBlock = 256;

// The number of a block type in the file. Those with a name here are decoded; a file may have
// others (checkpoint/ggml_types.h).
enum class GgufType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
  kTQ1_0 = 34,
  kTQ2_0 = 35,
  kMXFP4 = 39,
  kNVFP4 = 40,
  kNone = 255,  // no blocks: elements of a DType
};

struct GgufTypeInfo {
  GgufType type;
  std::string_view name;  // "Q4_K"
  int block_elems;        // columns per block; rows are whole blocks
  int block_bytes;
  int group;      // columns that share one scale; 0 for the plain types
  int code_bits;  // 4 when every code fits a nibble (signed or unsigned, see below), 6 when it lies in
                  // -32 .. 31, else 8
  bool is_signed;  // codes are signed; else 0 ..
  bool has_min;
  // Codes are stored as nibbles that stand for the values of this table, which fit a byte.
  CodeTable table = CodeTable::kNone;
  int super_bits = 0;        // see OperandQuant: what scales and minima of a block are
  bool half_scales = false;  // a block's scale is one F16 number
};
// Every type that is read, for messages: "F32, F16, ... or NVFP4".
std::string gguf_type_names();

// Null for an id that this library does not read.
const GgufTypeInfo* gguf_type_info(std::uint32_t type_id);

// Bytes of one row of `columns` elements. kUnsupported for an unknown type, kInvalidShape when
// columns is not a multiple of the block, kLimitExceeded.
Result<std::int64_t> gguf_row_bytes(std::uint32_t type_id, std::int64_t columns);

// Rows of blocks as canonical operands of the weight-only backends: value = scale * code - min, each
// one fp32 expression as ggml writes it.
//   blocks [rows, gguf_row_bytes] U8, any alignment
//   codes  [rows, columns] I8: signed codes, or unsigned ones below 128
//   scale  [rows, columns/group] F32
//   min    [rows, columns/group] F32; not present() for types without one
// scale and min are exact products of the stored numbers; NaN and infinity among them are refused
// (kInvalidArgument, naming row and block). Plain types are kUnsupported. Also the errors of
// gguf_row_bytes and the usual ones of arguments. Deterministic.
Status split_gguf(GgufType type, ConstTensorView blocks, TensorView codes, TensorView scale,
                  TensorView min);

// Rows of MXFP4 or NVFP4 blocks as these formats have them elsewhere: the same codes and scales in other
// places.
//   blocks [rows, gguf_row_bytes] U8, any alignment
//   codes  [rows, columns] F4E2M1, the even columns in the low halves of bytes
//   scale  [rows, columns/group] F8E8M0; 0xFF, which is NaN, is refused as by split_gguf. NVFP4: F8E4M3,
//          not negative; where a block means 0 by it, its codes are 0 as well
// Errors of split_gguf; kUnsupported for other types. Deterministic.
Status fp4_from_gguf(GgufType type, ConstTensorView blocks, TensorView codes, TensorView scale);

}  // namespace moesaic::quant
