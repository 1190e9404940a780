// Integer weights in 32-bit words (GPTQ, AWQ, compressed-tensors) of one linear: decoded whole into
// one code per byte and checked; slices are packed from there. Source: docs/spec/quantization.md
// section 11.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

struct IntegerLinear {
  std::int64_t rows = 0, columns = 0, groups = 0;
  Tensor codes;                    // U8 [rows, columns], as stored
  Tensor zeros;                    // U8 [rows, groups]; not present() for symmetric formats
  std::vector<float> scales;       // [rows, groups]
  std::vector<std::int32_t> perm;  // columns sorted by group; empty: they are
};

// kCorruptFile names the tensor: scales that are not finite and > 0, a group index out of range or
// not sorted where the configuration says so, zero points other than the fixed one in a symmetric
// format, a weight_shape other than [rows, columns]. kUnsupported: groups of uneven size.
Result<IntegerLinear> read_integer_linear(const MlpTensors& tensors, Projection projection,
                                          const LinearFormat& format, std::int64_t rows,
                                          std::int64_t columns);

}  // namespace moesaic::checkpoint
