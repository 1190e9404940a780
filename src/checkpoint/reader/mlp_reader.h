// One expert MLP from its stored tensors into canonical form: w13 [2 * width, H] with gate rows
// first ([width, H] without a gate), w2 [H, width], whatever the storage. The only place that knows
// transposes, interleaves and tensor-parallel slices. Source: docs/spec/checkpoints.md sections
// 3.4, 5 and 6.3.
#pragma once

#include <cstdint>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/families.h"
#include "checkpoint/config/quant_config.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// What to read: rows [first, first + count) of gate and up, the same columns of down.
struct MlpSlice {
  ExpertStorage storage = ExpertStorage::kPerExpert;
  bool gated = true;  // false: w13 is up alone, [count, H]
  StoredFormat format = StoredFormat::kPlain;
  DType dtype = DType::kBF16;  // of the weights; F32 where the files' differ
  std::int64_t hidden = 0;     // H
  std::int64_t width = 0;      // full I
  std::int64_t first = 0;
  std::int64_t count = 0;
  bool has_bias = false;
  bool with_down_bias = false;  // one tensor-parallel rank adds it, the others get zeros
  bool scales_stacked = false;  // FP8: scales of all experts in one tensor, gate's above up's
  std::int64_t leading = 0;     // 1: buffers get a leading dimension of 1 (shared expert)

  std::int64_t halves() const { return gated ? 2 : 1; }
};

// FP8-block: [2 * count / 128, ceil(H / 128)] and [ceil(H / 128), count / 128] F32 scales. Biases
// are F32. MXFP4: F4 weights and F8_E8M0 scales [2 * count, H / 32], [H, count / 32].
struct MlpBuffers {
  Tensor w13, w13_scale, w13_bias;
  Tensor w2, w2_scale, w2_bias;
  Tensor raw;    // transposed storages: one projection as it lies in the file; MXFP4: rows of it
  Tensor small;  // scales and biases before widening

  static Result<MlpBuffers> make(const MlpSlice& slice);
  Status make_biases(const MlpSlice& slice);  // w13_bias and w2_bias alone
};

// Slices must fall on whole blocks of `unit` (slice_unit): kInvalidArgument names dimension,
// parallel size and block.
Status check_slice(std::string_view field, std::int64_t width, std::int64_t parts,
                   std::int64_t unit);

// Reads expert `expert` (ignored by is_per_expert storages, whose `tensors` are its own). Every
// buffer is written in full. kCorruptFile names the tensor and the place: NaN codes in FP8 weights,
// scales that are NaN, infinite, negative, or zero over a tile that is not. Errors of reading as
// they come.
Status read_mlp(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
                MlpBuffers* buffers);

// The biases alone, for formats whose weights are read elsewhere.
Status read_mlp_biases(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert,
                       MlpBuffers* buffers);

// A whole tensor widened to F32 (from F32, BF16 or F16, exactly), with this shape.
Result<Tensor> read_widened(const ShardSet::Located& tensor, const Shape& shape);

}  // namespace moesaic
