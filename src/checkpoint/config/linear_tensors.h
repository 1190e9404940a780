// Which tensors a quantised linear consists of: the ends of their names, shapes and dtypes.
// Source: docs/spec/checkpoints.md sections 4, 4.1 and 4.2.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/config/linear_format.h"
#include "moesaic/dtype.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

enum class TensorKind : std::uint8_t {
  kWeight,
  kScale,
  kBias,
  kZero,         // zero points
  kGroupIndex,   // g_idx
  kGlobalScale,  // one more multiplier (or its reciprocal) for all of the tensor
  kInputScale,   // of the activations
  kPackedShape,  // compressed-tensors: the unpacked shape
  kCodeTable,    // bitsandbytes: the values of the codes
  kNestedScale,
  kNestedTable,
  kQuantState,  // bitsandbytes: JSON text
  kZeroBias,    // GPTQ writers add one to linears that have none: all zeros
  kRowFormat,   // bitsandbytes: the order of an int8 weight's elements, 0 for rows
  kIgnored,     // may be there; says nothing new
};
inline constexpr std::size_t kNumTensorKinds = 15;

struct LinearTensor {
  TensorKind kind;
  std::string_view suffix;    // ".weight_scale"
  std::vector<Shape> shapes;  // any of these; empty: any shape
  std::vector<DType> dtypes;
  bool optional = false;
};

// Tensors of a linear [rows, columns] (out, in). Empty for formats not stored linear by linear
// (plain, fp8-block, gpt-oss mxfp4, GGUF).
std::vector<LinearTensor> linear_tensors(const LinearFormat& format, std::int64_t rows,
                                         std::int64_t columns);

}  // namespace moesaic::checkpoint
