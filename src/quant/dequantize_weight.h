// A stored weight matrix of any scheme as plain fp32 numbers: what the codes, scales, zero points
// and permutation together mean. One element at a time; the reading side of conversion, and an
// oracle. No arithmetic of activations.
#pragma once

#include <cstdint>

#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// The tensors of one matrix [N, K], with the names, shapes and meanings of ExpertWeightsView. What
// the scheme does not use is absent.
struct StoredMatrix {
  ConstTensorView weight;
  ConstTensorView scale, global_scale, channel_scale, zero, min;
  ConstTensorView perm;  // act-order: stored column k is column perm[k] of the matrix
};

// out [N, K] F32 contiguous: the value of every weight, rounded to fp32 after each of at most three
// products. Columns in the model's order (a permutation is undone).
//   rows_per_part  rows after which block scales start anew: I for w13 of a gated layer, else N.
//                  Only read for granularity kBlock.
// kUnsupported for a format that weights do not have, kInvalidShape and kInvalidDType for tensors
// that contradict `quant`, kAliasing. Values are not judged: NaN scales give NaN.
Status dequantize_weight(const OperandQuant& quant, const StoredMatrix& stored,
                         std::int64_t rows_per_part, TensorView out);

}  // namespace moesaic::quant
