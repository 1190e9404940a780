// Packed weights, scales and biases of all local experts of one layer, as the CPU backends hold
// them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "experts/cpu/weight_format.h"
#include "experts/problem_checks.h"
#include "experts/reference/matrix.h"
#include "moesaic/experts.h"

namespace moesaic::experts {

// One of the two projections.
class CpuProjection {
 public:
  // Space for num_experts matrices and what the format keeps beside them.
  static Result<CpuProjection> allocate(const CpuWeightFormat& format,
                                        const cpu::PackedShape& shape, std::int64_t num_experts,
                                        bool has_bias, bool has_perm);
  // Repacks expert e, whose tensors (named `field` ...) have passed check_expert_weights.
  // kInvalidArgument: they do not keep OperandQuant::code_bits or super_bits.
  Status set_expert(std::int64_t e, std::string_view field, const ProjectionView& view,
                    int num_threads);

  const cpu::PackedShape& shape() const { return shape_; }
  const cpu::SuperScaleForm& super_form() const { return format_.super; }
  // The weights' side of a GEMM over panel p of expert e.
  cpu::PanelArgs panel(std::int64_t e, std::int64_t p) const;
  // Scales and offsets of super-blocks to F32 in buffer (CpuWorkspace::scales), for args, which is about
  // args.padded_k steps from step k0 of the panel on, whose scales are at `compact`.
  void expand_scales(const cpu::CpuKernels& kernels, const std::byte* compact, std::int64_t k0,
                     float* buffer, cpu::PanelArgs& args) const;
  // [64] factors of the panel's columns (but for static scales of the rows), or null.
  const float* column_factors(std::int64_t e, std::int64_t p) const {
    return factors_.empty() ? nullptr : &factors_[index(e, p) * cpu::kPanelColumns];
  }
  // [64] in column order, or null without bias.
  const float* panel_bias(std::int64_t e, std::int64_t p) const {
    return bias_.empty() ? nullptr : &bias_[index(e, p) * cpu::kPanelColumns];
  }
  // Static activation scales [E_l]; null where there are none (also of a rank without experts).
  const float* input_scales() const { return input_scale_.empty() ? nullptr : input_scale_.data(); }
  // [K] order of the columns, or null.
  const std::int32_t* perm(std::int64_t e) const {
    return perm_.empty() ? nullptr : &perm_[static_cast<std::size_t>(e * shape_.k)];
  }
  std::int64_t bytes() const;
  // Every array that has a row per expert; `second` is the name's choice between w13 and w2.
  void append_parts(bool second, std::int64_t num_experts, std::vector<ExpertPart>& to);

 private:
  std::size_t index(std::int64_t e, std::int64_t p) const {
    return static_cast<std::size_t>(e * shape_.num_panels() + p);
  }
  void set_factors(std::int64_t e, const ProjectionView& view);
  Status set_super_scales(std::int64_t e, std::string_view field, const ProjectionView& view,
                          int num_threads);

  CpuWeightFormat format_;
  cpu::PackedShape shape_;
  cpu::CodeTable4 codes_{};
  std::int64_t groups_ = 0;       // per panel, grouped formats
  std::int64_t scale_bytes_ = 0;  // of a panel's group scales
  cpu::WeightBuffer weights_, group_scales_, group_offsets_;
  std::vector<float> block_scales_, factors_, bias_, input_scale_;
  std::vector<std::int32_t> perm_;
};

struct CpuExpertWeights {
  CpuProjection w13, w2;
  // Reads every expert from the source once, in order.
  static Result<CpuExpertWeights> load(const MoeProblem& problem, const CpuWeightFormats& formats,
                                       ExpertSource& source, int num_threads);
  std::int64_t bytes() const { return w13.bytes() + w2.bytes(); }
};

}  // namespace moesaic::experts
