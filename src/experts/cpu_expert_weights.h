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
  // E8M0 [K / 32][64] of the panel, or null for other weights than e2m1.
  const std::uint8_t* panel_exponents(std::int64_t e, std::int64_t p) const {
    return exponents_.bytes() == 0
               ? nullptr
               : reinterpret_cast<const std::uint8_t*>(exponents_.data()) +
                     static_cast<std::int64_t>(index(e, p)) * exponents_per_panel();
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
  std::int64_t exponents_per_panel() const {
    return shape_.padded_k() / cpu::kMxSteps * cpu::kPanelColumns;
  }
  cpu::PackedShape shape_;
  cpu::WeightBuffer weights_, exponents_;
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
