// What a quantised expert is read into: the tensors of its two matrices, in canonical form.
#pragma once

#include <cstdint>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/experts.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// What to read: rows [first, first + count) of gate and up, the same columns of down.
struct QuantizedSlice {
  LinearFormat format;
  Scheme scheme;
  // Not is_per_expert: the tensors hold all `experts` (GGUF, stacked_tensors.h).
  ExpertStorage storage = ExpertStorage::kPerExpert;
  std::int64_t experts = 1;
  bool scales_stacked = false;  // numbers of all experts in one tensor, whatever the storage
  bool gated = true;
  std::int64_t hidden = 0;  // H
  std::int64_t width = 0;   // full I
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// One matrix [rows, columns]. Shapes and dtypes of all but `weight` as ExpertWeightsView has them;
// what the scheme does not use is not present().
struct MatrixBuffers {
  Tensor weight, scale, zero, min, global_scale, channel_scale, input_scale, perm;
  static Result<MatrixBuffers> make(const Scheme& scheme, std::int64_t rows, std::int64_t columns);
  std::int64_t bytes() const;
};
struct QuantizedBuffers {
  MatrixBuffers w13, w2;
  static Result<QuantizedBuffers> make(const QuantizedSlice& slice);
  std::int64_t bytes() const { return w13.bytes() + w2.bytes(); }
};
// Views of everything but biases.
ExpertWeightsView view_of(const QuantizedBuffers& buffers);

}  // namespace moesaic
