// Packed weights, scales and biases of all local experts of one layer, as the CPU backends hold
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/packed_weights.h"
#include "experts/problem_checks.h"
#include "moesaic/experts.h"

namespace moesaic {

// One of the two projections.
class CpuProjection {
 public:
  // Space for num_experts matrices; scales and bias only when asked for.
  static Result<CpuProjection> allocate(const cpu::PackedShape& shape, std::int64_t num_experts,
                                        bool has_scale, bool has_bias);
  // Repacks expert e. Tensors have passed check_expert_weights.
  void set_expert(std::int64_t e, const ConstTensorView& weight, const ConstTensorView& scale,
                  const ConstTensorView& bias, int num_threads);

  const cpu::PackedShape& shape() const { return shape_; }
  const std::byte* panel(std::int64_t e, std::int64_t p) const {
    return weights_.data() + e * shape_.matrix_bytes() + p * shape_.panel_bytes();
  }
  // [groups][4] of the panel, or null without scales.
  const float* panel_scales(std::int64_t e, std::int64_t p) const {
    return scales_.empty()
               ? nullptr
               : &scales_[index(e, p) * static_cast<std::size_t>(4 * shape_.num_groups())];
  }
  // [64] in column order, or null without bias.
  const float* panel_bias(std::int64_t e, std::int64_t p) const {
    return bias_.empty() ? nullptr : &bias_[index(e, p) * cpu::kPanelColumns];
  }
  std::int64_t bytes() const;

 private:
  std::size_t index(std::int64_t e, std::int64_t p) const {
    return static_cast<std::size_t>(e * shape_.num_panels() + p);
  }
  cpu::PackedShape shape_;
  cpu::WeightBuffer weights_;
  std::vector<float> scales_, bias_;
};

struct CpuExpertWeights {
  CpuProjection w13, w2;
  // Reads every expert from the source once, in order.
  static Result<CpuExpertWeights> load(const MoeProblem& problem, ExpertSource& source,
                                       int num_threads);
  std::int64_t bytes() const { return w13.bytes() + w2.bytes(); }
};

}  // namespace moesaic
