// One projection of all local experts, kept as the checkpoint stores it, and its product with one
// row, in plain loops over any weight format.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "experts/reference/operand.h"
#include "moesaic/experts.h"
#include "quant/code_values.h"
#include "quant/compute_scheme.h"

namespace moesaic::experts {

// The tensors of one projection in an ExpertWeightsView.
struct ProjectionView {
  ConstTensorView weight, scale, bias, global_scale, channel_scale, zero, min, input_scale, perm;
  std::int64_t parts = 1;  // gate and up: blocks of rows are counted within each
};
ProjectionView w13_of(const ExpertWeightsView& view);
ProjectionView w2_of(const ExpertWeightsView& view);

class RefMatrix {
 public:
  // parts: as ProjectionView has them.
  RefMatrix(const Scheme& quant, std::int64_t num_experts, std::int64_t parts, std::int64_t rows,
            std::int64_t columns);

  // Copies one expert's tensors; they have passed check_expert_weights. Experts come in order.
  Status append(std::int64_t e, std::string_view field, const ProjectionView& view);
  std::int64_t bytes() const;
  // Every tensor, one row per expert; `second` is the name's choice between w13 and w2.
  void append_parts(bool second, std::vector<ExpertPart>& to);

  // The experts' static activation scales [E_l], or null.
  const float* input_scales() const {
    return input_scale_.present() ? input_scale_.as<float>() : nullptr;
  }
  // to[k] = from[perm[k]], the order in which the weights' columns are stored. Returns false (and
  // writes nothing) when there is no permutation.
  bool gather(std::int64_t e, const float* from, float* to) const;
  // out[n] = x . w[e][n] + bias[e][n]. Scales act on each group's partial sum, inside the
  // accumulation; what belongs to a whole row or column is applied to the sum.
  void multiply(std::int64_t e, const RefOperand& x, float* out) const;

 private:
  float dot(std::int64_t e, std::int64_t n, const float* x, std::int64_t begin, std::int64_t count,
            std::int64_t scale_index) const;
  void codes(std::int64_t index, std::span<float> out) const;

  OperandQuant quant_;
  quant::CodeValues values_;  // of 4-bit codes
  bool four_bits_;
  std::int64_t num_experts_, rows_, columns_, part_rows_;
  std::int64_t scale_columns_ = 0, scales_per_expert_ = 0;
  Tensor weight_, scale_, bias_, global_scale_, channel_scale_, zero_, min_, input_scale_, perm_;
};

}  // namespace moesaic::experts
