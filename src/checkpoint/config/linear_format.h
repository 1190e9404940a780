// How one linear layer is stored: which tensors make it up, and what scheme they mean. A value;
// several formats of one model may differ. Source: docs/spec/checkpoints.md sections 4, 4.1, 4.2.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "checkpoint/container/ggml_types.h"
#include "moesaic/dtype.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"
#include "quant/block_scales.h"

namespace moesaic::checkpoint {

enum class StoredFormat : std::uint8_t {
  kPlain,        // BF16, F16 or F32, as the tensors say
  kFp8Block,     // F8_E4M3, one multiplier per tile, which is nearly always 128x128
  kMxfp4,        // e2m1 blocks and E8M0 scales of 32, as gpt-oss stores its experts
  kFp8Tensor,    // F8_E4M3, one multiplier
  kFp8Channel,   // F8_E4M3, one multiplier per row
  kMxfp8,        // F8_E4M3 and E8M0 scales of 32
  kInt8Channel,  // I8, one multiplier per row (or one in all, see one_scale)
  kPacked,       // compressed-tensors integers in words
  kGptq,
  kAwq,
  kNvfp4,        // e2m1, F8_E4M3 scales of 16 and a global one
  kMxfp4Linear,  // e2m1 and E8M0 scales of 32, one tensor pair per linear
  kBnb4,         // bitsandbytes nf4 or fp4
  kBnb8,         // bitsandbytes LLM.int8
  kGguf,         // GGUF blocks
};
// "fp8-block", "gptq" ...: for messages.
std::string_view stored_format_name(StoredFormat format);

inline constexpr std::size_t kNumStoredFormats = 15;

// Whose names the tensors have, where that is not settled by the format.
// kFp8: one scale per tensor is "weight_scale" and "input_scale"; kFp8Inverse: the same numbers, and
// those of MXFP8, as transformers calls them, "weight_scale_inv" and "activation_scale".
enum class NameStyle : std::uint8_t { kFp8, kFp8Inverse, kCompressed, kModelOpt };
enum class ActivationQuant : std::uint8_t {
  kNone,     // weight-only
  kDynamic,  // quantised at run time, as the format's scheme says
  kStatic,   // with a stored scale per tensor
};

struct LinearFormat {
  StoredFormat stored = StoredFormat::kPlain;
  NameStyle names = NameStyle::kFp8;
  ActivationQuant activation = ActivationQuant::kNone;
  int bits = 0;                        // of integer codes: 4 or 8; kMxfp4Linear: of activations
  bool byte_codes = false;             // kPacked: signed codes, one per byte
  std::int64_t group_size = 0;         // columns per scale of integer codes; -1: the whole row
  bool zero_points = false;            // stored per group; otherwise the codes have a fixed bias
  bool zeros_minus_one = false;        // GPTQ's first file format
  bool act_order = false;              // columns belong to groups by an index tensor
  bool one_scale = false;              // kInt8Channel: one multiplier for all rows
  bool nested = false;                 // kBnb4: the scales are quantised themselves
  CodeTable table = CodeTable::kNone;  // kBnb4
  // Dynamic activation scales are asked for per tensor, and computed per token.
  bool batch_scale = false;
  bool ue8m0 = false;       // kFp8Block: run-time activation scales are powers of two
  quant::BlockShape block;  // kFp8Block: of a tile
  // kGguf: of gate, up and down.
  std::array<quant::GgufType, 3> blocks = {quant::GgufType::kNone, quant::GgufType::kNone,
                                           quant::GgufType::kNone};
  // Integer codes: of the scales in the file. F32: any, or not known.
  DType scale_dtype = DType::kF32;
  bool outer_scale = false;  // kGguf: a number of the expert's beside the blocks
  bool operator==(const LinearFormat&) const = default;
};

// The scheme that the stored numbers mean. `dtype` is that of kPlain weights. kInvalidDType for a
// plain dtype that is none of F32, BF16, F16. Schemes that have no name of their own are the
// nearest named one with other operands.
Result<Scheme> linear_scheme(const LinearFormat& format, DType dtype);

// Checks that a [rows, columns] linear has whole groups and whole words of the format. kUnsupported
// names the sizes and the multiple needed. `what` begins the message.
Status check_linear_sizes(const LinearFormat& format, std::string_view what, std::int64_t rows,
                          std::int64_t columns);

// Columns of w2 (and rows of gate and up) can be cut at multiples of this.
std::int64_t slice_unit(const LinearFormat& format);

// kFp8Block: the scales of a [rows, columns] linear.
Shape fp8_scale_grid(const LinearFormat& format, std::int64_t rows, std::int64_t columns);

}  // namespace moesaic::checkpoint
