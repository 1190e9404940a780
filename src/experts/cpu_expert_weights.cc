#include "experts/cpu_expert_weights.h"

#include <new>
#include <utility>

#include "core/fault.h"
#include "numerics/element.h"

namespace moesaic {

Result<CpuProjection> CpuProjection::allocate(const cpu::PackedShape& shape,
                                              std::int64_t num_experts, bool has_scale,
                                              bool has_bias) {
  MOESAIC_RETURN_IF_ERROR(cpu::check_packed_shape(shape, num_experts));
  CpuProjection p;
  p.shape_ = shape;
  MOESAIC_ASSIGN_OR_RETURN(p.weights_,
                           cpu::WeightBuffer::allocate(shape.matrix_bytes() * num_experts));
  if (shape.kind == cpu::WeightKind::kE2M1) {
    MOESAIC_ASSIGN_OR_RETURN(
        p.exponents_,
        cpu::WeightBuffer::allocate(num_experts * shape.num_panels() * p.exponents_per_panel()));
  }
  const std::size_t panels = static_cast<std::size_t>(num_experts * shape.num_panels());
  try {
    if (has_scale) p.scales_.resize(panels * static_cast<std::size_t>(4 * shape.num_groups()));
    if (has_bias) p.bias_.resize(panels * cpu::kPanelColumns);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the scales and biases of the experts");
  }
  return p;
}

void CpuProjection::set_expert(std::int64_t e, const ConstTensorView& weight,
                               const ConstTensorView& scale, const ConstTensorView& bias,
                               int num_threads) {
  cpu::pack_matrix(shape_, weight.data, weights_.data() + e * shape_.matrix_bytes(), num_threads);
  if (!scales_.empty()) {
    cpu::pack_block_scales(shape_, scale.as<float>(), scale.dim(1),
                           const_cast<float*>(panel_scales(e, 0)));
  }
  if (exponents_.bytes() > 0) {
    cpu::pack_exponents(shape_, scale.as<std::uint8_t>(),
                        const_cast<std::uint8_t*>(panel_exponents(e, 0)));
  }
  if (bias_.empty() || !bias.present()) return;
  for (std::int64_t p = 0; p < shape_.num_panels(); ++p) {
    float* out = const_cast<float*>(panel_bias(e, p));
    for (int c = 0; c < cpu::kPanelColumns; ++c) {
      const std::int64_t row = shape_.source_row(p, c);
      if (row < 0 || MOESAIC_FAULT(cpu_bias_dropped)) continue;
      out[c] = load_as_f32(bias.data, bias.dtype, row);
    }
  }
}

std::int64_t CpuProjection::bytes() const {
  return weights_.bytes() + exponents_.bytes() +
         static_cast<std::int64_t>((scales_.size() + bias_.size()) * sizeof(float));
}

Result<CpuExpertWeights> CpuExpertWeights::load(const MoeProblem& problem, ExpertSource& source,
                                                int num_threads) {
  const bool gated = is_gated(problem.activation.kind);
  const bool has_scale = problem.quant.weight.granularity == ScaleGranularity::kBlock;
  MOESAIC_ASSIGN_OR_RETURN(const cpu::WeightKind kind,
                           cpu::weight_kind(problem.quant.weight.dtype));
  const cpu::PackedShape shape13{kind, gated ? cpu::RowOrder::kGateUp : cpu::RowOrder::kPlain,
                                 w13_rows(problem), problem.hidden_size};
  const cpu::PackedShape shape2{kind, cpu::RowOrder::kPlain, problem.hidden_size,
                                problem.intermediate_size};
  const std::int64_t num_experts = problem.num_local_experts;
  CpuExpertWeights w;
  MOESAIC_ASSIGN_OR_RETURN(
      w.w13, CpuProjection::allocate(shape13, num_experts, has_scale, problem.has_expert_bias));
  MOESAIC_ASSIGN_OR_RETURN(
      w.w2, CpuProjection::allocate(shape2, num_experts, has_scale, problem.has_expert_bias));
  for (std::int64_t e = 0; e < num_experts; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
    MOESAIC_RETURN_IF_ERROR(check_expert_weights(problem, view, e));
    w.w13.set_expert(e, view.w13, view.w13_scale, view.w13_bias, num_threads);
    w.w2.set_expert(e, view.w2, view.w2_scale, view.w2_bias, num_threads);
  }
  return w;
}

}  // namespace moesaic
