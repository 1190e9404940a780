// One expert MLP from its stored tensors into canonical form, whatever the storage (window.h) and the
// stored format: one codec for each (mlp_reader_impl.h). The words and blocks themselves are decoded
// by src/quant. Source: docs/spec/checkpoints.md sections 3.4 to 6.
#pragma once

#include <cstdint>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/reader/input_scales.h"
#include "checkpoint/reader/mlp_buffers.h"
#include "checkpoint/reader/window.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// Reads expert `expert` (which matters for stacked tensors only). Every buffer is written in full.
// kCorruptFile names the tensor and the place: NaN codes, scales that are NaN, infinite or not > 0
// (0 only over weights that are all zero; GGUF minima and scales may have either sign), E8M0 0xFF,
// group indices out of range or against the configuration, zero points that a symmetric format does
// not have, a weight_shape or quantisation state that contradicts the tensors. kUnsupported: gate
// and up with different group indices (but see read_wide_mlp), groups of uneven size. Errors of
// reading as they come.
Status read_mlp(const MlpTensors& tensors, const MlpSlice& slice, const InputScales& input_scales,
                std::int64_t expert, MlpBuffers* buffers);

// Those of one expert, into buffers whose scheme has them.
void set_input_scales(const InputScales& scales, std::int64_t expert, MlpBuffers* buffers);

// read_mlp of a quantised format in plain form, for weights that have no other: `slice.scheme` is
// F32's.
Status read_wide_mlp(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
                     MlpBuffers* buffers);

// The values of a matrix in fp32, row-major. `columns` of the matrix; out has rows * columns
// elements. Each value is rounded once per product.
void dequantize_matrix(const OperandQuant& weight, const MatrixBuffers& matrix, std::int64_t rows,
                       std::int64_t columns, float* out);

// A whole tensor widened to F32 (from F32, BF16 or F16, exactly), with this shape.
Result<Tensor> read_widened(const ShardSet::Located& tensor, const Shape& shape);

}  // namespace moesaic::checkpoint
