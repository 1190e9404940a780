// One expert MLP stored in a quantised format, tensor by tensor per linear or in GGUF blocks, into
// canonical form: the same shapes as reader/mlp_reader.h, with what the weight's OperandQuant says
// beside them. The only place that knows file layouts of quantised weights; the words and blocks
// themselves are decoded by src/quant. Source: docs/spec/checkpoints.md sections 4 to 6.
#pragma once

#include <cstdint>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/quantized_buffers.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// Reads expert `expert` (which matters for stacked tensors only). Every buffer is written in full.
// kCorruptFile names the tensor and the place: NaN codes, scales that are NaN, infinite or not > 0
// (0 only over weights that are all zero; GGUF minima and scales may have either sign), E8M0 0xFF,
// group indices out of range or against the configuration, zero points that a symmetric format does
// not have, a weight_shape or quantisation state that contradicts the tensors. kUnsupported: gate
// and up with different group indices (but see read_wide_mlp), groups of uneven size. Errors of
// reading as they come.
Status read_quantized_mlp(const MlpTensors& tensors, const QuantizedSlice& slice,
                          const InputScales& input_scales, std::int64_t expert,
                          QuantizedBuffers* buffers);

// The same in plain form, for weights that are few or have no other: F32 w13 and w2 of the slice.
Status read_wide_mlp(const MlpTensors& tensors, const QuantizedSlice& slice, std::int64_t expert,
                     Tensor* w13, Tensor* w2);

// The values of a matrix in fp32, row-major: for weights that are too few to matter. `columns` of
// the matrix; out has rows * columns elements. Each value is rounded once per product.
void dequantize_matrix(const OperandQuant& weight, const MatrixBuffers& matrix, std::int64_t rows,
                       std::int64_t columns, float* out);

}  // namespace moesaic
