// One expert MLP stored in a quantised format, tensor by tensor per linear or in GGUF blocks, into
// canonical form: the same shapes as loader/mlp_reader.h, with what the weight's OperandQuant says
// beside them. The only place that knows file layouts of quantised weights; the words and blocks
// themselves are decoded by src/quant. Source: spec checkpoints.md sections 4 to 6.
#pragma once

#include <cstdint>

#include "checkpoint/layer_binding.h"
#include "checkpoint/linear_format.h"
#include "moesaic/experts.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// What to read: rows [first, first + count) of gate and up, the same columns of down.
struct QuantizedSlice {
  LinearFormat format;
  QuantScheme scheme;
  // Not is_per_expert: the tensors hold all `experts` (GGUF, stacked_tensors.h).
  ExpertStorage storage = ExpertStorage::kPerExpert;
  std::int64_t experts = 1;
  bool gated = true;
  std::int64_t hidden = 0;  // H
  std::int64_t width = 0;   // full I
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Static activation scales of a layer, the same for all of its experts (dequantisation
// multipliers); 0 where the scheme has none.
struct InputScales {
  float w13 = 0;
  float w2 = 0;
};
// The largest of all experts', so that no expert's activations saturate and every rank has the same
// ones. kCorruptFile for a value that is not finite and > 0.
Result<InputScales> read_input_scales(const std::vector<MlpTensors>& experts,
                                      const LinearFormat& format);

// What only the stored numbers tell of a layer's scheme. Where any expert's gate has another scale
// than its up, w13 has a scale per row: FP8 with a scale per tensor becomes kChannel, the global
// scale of NVFP4 OuterScale::kChannel. Nothing is requantised. Where any expert's gate has another
// group index than its up, w13 has no one order of columns: the layer becomes F32 (read_wide_mlp).
Status scheme_of_values(const std::vector<MlpTensors>& experts, const LinearFormat& format,
                        QuantScheme* scheme);

// One matrix [rows, columns]. Shapes and dtypes of all but `weight` as ExpertWeightsView has them;
// what the scheme does not use is not present().
struct MatrixBuffers {
  Tensor weight, scale, zero, min, global_scale, channel_scale, input_scale, perm;
  static Result<MatrixBuffers> make(const QuantScheme& scheme, std::int64_t rows,
                                    std::int64_t columns);
  std::int64_t bytes() const;
};
struct QuantizedBuffers {
  MatrixBuffers w13, w2;
  static Result<QuantizedBuffers> make(const QuantizedSlice& slice);
  std::int64_t bytes() const { return w13.bytes() + w2.bytes(); }
};
// Views of everything but biases.
ExpertWeightsView view_of(const QuantizedBuffers& buffers);

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
