// What an expert is read into: its two matrices in canonical form, w13 [2 * count, H] with gate
// rows first ([count, H] without a gate) and w2 [H, count], and what the scheme has beside them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "checkpoint/reader/window.h"
#include "moesaic/experts.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// One matrix [parts * part_rows, columns]; gate and up are two parts, within which blocks of rows are
// counted. Shapes and dtypes of all but `weight` as ExpertWeightsView has them;
// what the scheme does not use is not present().
struct MatrixBuffers {
  Tensor weight, scale, zero, min, global_scale, channel_scale, input_scale, perm;
  static Result<MatrixBuffers> make(const Scheme& scheme, std::int64_t parts,
                                    std::int64_t part_rows, std::int64_t columns);
  std::int64_t bytes() const;
};

// A part of a tensor as it lies in the file. Gate and up whose rows take turns are read once.
struct StagedBytes {
  const TensorInfo* info = nullptr;
  Rectangle part;
  Tensor bytes;
};

struct MlpBuffers {
  MatrixBuffers w13, w2;
  Tensor w13_bias, w2_bias;           // F32
  std::array<StagedBytes, 2> staged;  // of weights and of scales; grow as needed
  static Result<MlpBuffers> make(const MlpSlice& slice);
  // Bytes of all tensors; staged bytes are not counted.
  std::int64_t bytes() const {
    return w13.bytes() + w2.bytes() + w13_bias.bytes() + w2_bias.bytes();
  }
};
ExpertWeightsView view_of(const MlpBuffers& buffers);

// The `slice.count` rows of gate and up and columns of down in `from` (none: `from` may be empty)
// into buffers with `slice.padded` of them. What is added is zero, with scales of one: it adds
// nothing to any sum. Of formats with weights, E8M0 scales and biases alone.
void pad_mlp(const MlpBuffers& from, const MlpSlice& slice, MlpBuffers* to);

}  // namespace moesaic::checkpoint
