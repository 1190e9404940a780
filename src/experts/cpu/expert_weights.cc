#include "experts/cpu/expert_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <string_view>
#include <utility>

#include "core/fault.h"
#include "cpu/super_scales.h"
#include "experts/matrix_form.h"
#include "numerics/element.h"

namespace moesaic::experts {

Result<CpuProjection> CpuProjection::allocate(const CpuWeightFormat& format,
                                              const cpu::PackedShape& shape,
                                              std::int64_t num_experts, bool has_bias,
                                              bool has_perm) {
  MOESAIC_RETURN_IF_ERROR(cpu::check_packed_shape(shape, num_experts));
  CpuProjection p;
  p.format_ = format;
  p.shape_ = shape;
  p.codes_ = cpu::make_code_table(format.code_values);
  MOESAIC_ASSIGN_OR_RETURN(p.weights_,
                           cpu::WeightBuffer::allocate(shape.matrix_bytes() * num_experts));
  const std::int64_t panels = num_experts * shape.num_panels();
  if (format.grouped) p.groups_ = shape.padded_k() / format.fold;
  if (format.group_scales != cpu::GroupScaleForm::kNone) {
    p.scale_bytes_ = format.super.bits != 0
                         ? format.super.panel_bytes(shape.padded_k())
                         : p.groups_ * cpu::kPanelColumns * cpu::bytes_of(format.group_scales);
    MOESAIC_ASSIGN_OR_RETURN(p.group_scales_, cpu::WeightBuffer::allocate(panels * p.scale_bytes_));
  }
  if (format.group_offsets && format.super.bits == 0) {
    MOESAIC_ASSIGN_OR_RETURN(
        p.group_offsets_, cpu::WeightBuffer::allocate(panels * p.groups_ * cpu::kPanelColumns * 4));
  }
  const auto count = static_cast<std::size_t>(panels);
  try {
    if (format.block_scales)
      p.block_scales_.resize(count * static_cast<std::size_t>(4 * shape.num_groups()));
    if (format.column_factors) p.factors_.resize(count * cpu::kPanelColumns);
    if (has_bias) p.bias_.resize(count * cpu::kPanelColumns);
    if (has_perm) p.perm_.resize(static_cast<std::size_t>(num_experts * shape.k));
    if (format.static_rows) p.input_scale_.resize(static_cast<std::size_t>(num_experts), 1.0F);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the scales and biases of the experts");
  }
  return p;
}

Status CpuProjection::set_expert(std::int64_t e, std::string_view field, const ProjectionView& v,
                                 int num_threads) {
  if (const std::int64_t at = cpu::find_wide_code(shape_, v.weight.data); at >= 0) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("{}: expert {}: got code {} at row {}, column {}, need -32 to 31 "
                    "(quant.weight.code_bits)",
                    field, e, v.weight.as<std::int8_t>()[at], at / shape_.k, at % shape_.k));
  }
  cpu::pack_matrix(shape_, v.weight.data, weights_.data() + e * shape_.matrix_bytes(), num_threads);
  const std::int64_t first = e * shape_.num_panels();
  if (format_.block_scales) {
    cpu::pack_block_scales(
        shape_, v.scale.as<float>(), v.scale.dim(1),
        &block_scales_[static_cast<std::size_t>(first * 4 * shape_.num_groups())]);
  }
  const std::int64_t columns = format_.columns_per_scale > 0 ? format_.columns_per_scale
                                                             : std::max<std::int64_t>(shape_.k, 1);
  if (format_.super.bits != 0) {
    MOESAIC_RETURN_IF_ERROR(set_super_scales(e, field, v, num_threads));
  } else if (scale_bytes_ > 0) {
    const std::int64_t bad = cpu::pack_group_scales(
        shape_, format_.fold, {format_.rows_per_scale, columns}, format_.group_scales, v.scale,
        group_scales_.data() + first * scale_bytes_);
    if (bad >= 0) {
      const bool half = format_.group_scales == cpu::GroupScaleForm::kF16;
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}_scale: expert {}: got {} at row {}, group {}, need a number of "
                                "{} (quant.weight.scale_dtype)",
                                field, e, load_as_f32(v.scale.data, v.scale.dtype, bad),
                                bad / v.scale.dim(1), bad % v.scale.dim(1), half ? "F16" : "BF16"));
    }
  }
  if (group_offsets_.bytes() > 0) {
    cpu::pack_group_offsets(
        shape_, format_.fold, columns, v.scale, v.zero, v.min, format_.code_bias,
        reinterpret_cast<float*>(group_offsets_.data()) + first * groups_ * cpu::kPanelColumns);
  }
  if (!input_scale_.empty())
    input_scale_[static_cast<std::size_t>(e)] = v.input_scale.as<float>()[0];
  if (!perm_.empty()) {
    std::copy_n(v.perm.as<std::int32_t>(), shape_.k,
                &perm_[static_cast<std::size_t>(e * shape_.k)]);
  }
  if (format_.column_factors) set_factors(e, v);
  if (bias_.empty() || !v.bias.present()) return {};
  for (std::int64_t p = 0; p < shape_.num_panels(); ++p) {
    float* out = const_cast<float*>(panel_bias(e, p));
    for (int c = 0; c < cpu::kPanelColumns; ++c) {
      const std::int64_t row = shape_.source_row(p, c);
      if (row < 0 || MOESAIC_FAULT(cpu_bias_dropped)) continue;
      out[c] = load_as_f32(v.bias.data, v.bias.dtype, row);
    }
  }
  return {};
}

Status CpuProjection::set_super_scales(std::int64_t e, std::string_view field,
                                       const ProjectionView& v, int num_threads) {
  const std::int64_t bad = cpu::pack_super_scales(
      shape_, format_.super, v.scale, v.min,
      group_scales_.data() + e * shape_.num_panels() * scale_bytes_, num_threads);
  if (bad < 0) return {};
  const std::int64_t blocks = ceil_div(shape_.k, cpu::SuperScaleForm::kSteps);
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("{0}_scale, {0}_min: expert {1}: got numbers at row {2}, columns from {3} "
                  "on that are no integers of {4} bits times one number of F16, need such "
                  "ones (quant.weight.super_bits)",
                  field, e, bad / blocks, bad % blocks * cpu::SuperScaleForm::kSteps,
                  format_.super.bits));
}

void CpuProjection::expand_scales(const cpu::CpuKernels& kernels, const std::byte* compact,
                                  std::int64_t k0, float* buffer, cpu::PanelArgs& args) const {
  cpu::SuperScaleArgs from;
  from.form = format_.super;
  from.compact = compact + k0 / cpu::SuperScaleForm::kSteps * format_.super.block_bytes();
  from.per_scale = static_cast<int>(format_.super.group / format_.fold);
  from.bias = static_cast<float>(format_.code_bias);
  from.groups = args.padded_k / format_.fold;
  from.scales = buffer;
  if (format_.group_offsets) from.offsets = buffer + from.groups * cpu::kPanelColumns;
  // Behind what the GEMM asks for itself. (All of the block: slower.)
  constexpr std::int64_t kAhead = 4096, kMost = 4096;
  from.fetch = args.panel + kAhead;
  from.fetch_lines = std::min(shape_.bytes_of(args.padded_k), kMost) / 64;
  kernels.expand_super_scales(from);
  args.group_scales = reinterpret_cast<const std::byte*>(from.scales);
  args.group_offsets = from.offsets;
}

// The expert's or the row's own scale. Padding columns get 0.
void CpuProjection::set_factors(std::int64_t e, const ProjectionView& v) {
  const bool global = v.global_scale.present();
  for (std::int64_t p = 0; p < shape_.num_panels(); ++p) {
    float* out = const_cast<float*>(column_factors(e, p));
    for (int c = 0; c < cpu::kPanelColumns; ++c) {
      const std::int64_t row = shape_.source_row(p, c);
      if (row < 0) continue;
      const std::int64_t at = v.scale.rank() == 1 && v.scale.dim(0) > 1 ? row : 0;
      float own = 1;
      if (v.channel_scale.present()) {
        own = v.channel_scale.as<float>()[row];
      } else if (global) {
        own = v.global_scale.as<float>()[0];
      } else if (scale_bytes_ == 0) {  // else groups have the scales, and rows one number
        own = load_as_f32(v.scale.data, v.scale.dtype, at);
      }
      out[c] = own;
    }
  }
}

cpu::PanelArgs CpuProjection::panel(std::int64_t e, std::int64_t p) const {
  const auto i = static_cast<std::int64_t>(index(e, p));
  cpu::PanelArgs args;
  args.panel = weights_.data() + e * shape_.matrix_bytes() + p * shape_.panel_bytes();
  args.padded_k = shape_.padded_k();
  if (!block_scales_.empty())
    args.panel_scales = &block_scales_[static_cast<std::size_t>(i * 4 * shape_.num_groups())];
  if (!format_.grouped) return args;
  args.fold = static_cast<int>(format_.fold);
  args.codes = &codes_;
  args.group_scale_form = format_.group_scales;
  if (shape_.kind == cpu::WeightKind::kInt4Fp8) {  // its scales are part of the operands
    args.products = &cpu::int4_products();
    args.group_scale_form = cpu::GroupScaleForm::kNone;
  }
  if (scale_bytes_ > 0) args.group_scales = group_scales_.data() + i * scale_bytes_;
  args.super = format_.super;
  args.super_blocks = args.group_scales;
  args.super_bias = static_cast<float>(format_.code_bias);
  if (group_offsets_.bytes() > 0) {
    args.group_offsets =
        reinterpret_cast<const float*>(group_offsets_.data()) + i * groups_ * cpu::kPanelColumns;
  }
  return args;
}

std::int64_t CpuProjection::bytes() const {
  return weights_.bytes() + group_scales_.bytes() + group_offsets_.bytes() +
         static_cast<std::int64_t>((block_scales_.size() + factors_.size() + bias_.size() +
                                    input_scale_.size() + perm_.size()) *
                                   sizeof(float));
}

void CpuProjection::append_parts(bool second, std::int64_t num_experts,
                                 std::vector<ExpertPart>& to) {
  const auto add = [&](std::string_view w13, std::string_view w2, void* data, std::int64_t bytes) {
    if (bytes == 0) return;
    to.push_back({second ? w2 : w13, TensorView(static_cast<std::byte*>(data), DType::kU8,
                                                Shape{num_experts, bytes / num_experts})});
  };
  const auto size = [](const auto& words) {
    return static_cast<std::int64_t>(words.size() * sizeof(words[0]));
  };
  // Names that tell layouts apart: ranks on different machines must not exchange them.
  if (format_.integer_products) {
    add("w13.weights_i8", "w2.weights_i8", weights_.data(), weights_.bytes());
  } else {
    add("w13.weights", "w2.weights", weights_.data(), weights_.bytes());
  }
  if (format_.super.bits != 0) {
    add("w13.super_scales", "w2.super_scales", group_scales_.data(), group_scales_.bytes());
  } else if (format_.group_scales == cpu::GroupScaleForm::kF16) {
    add("w13.group_scales_f16", "w2.group_scales_f16", group_scales_.data(), group_scales_.bytes());
  } else if (format_.group_scales == cpu::GroupScaleForm::kBF16) {
    add("w13.group_scales_bf16", "w2.group_scales_bf16", group_scales_.data(),
        group_scales_.bytes());
  } else {
    add("w13.group_scales", "w2.group_scales", group_scales_.data(), group_scales_.bytes());
  }
  add("w13.group_offsets", "w2.group_offsets", group_offsets_.data(), group_offsets_.bytes());
  add("w13.block_scales", "w2.block_scales", block_scales_.data(), size(block_scales_));
  if (!MOESAIC_FAULT(cpu_column_factors_stay_behind)) {
    add("w13.column_factors", "w2.column_factors", factors_.data(), size(factors_));
  }
  add("w13.bias", "w2.bias", bias_.data(), size(bias_));
  add("w13.input_scale", "w2.input_scale", input_scale_.data(), size(input_scale_));
  add("w13.perm", "w2.perm", perm_.data(), size(perm_));
}

Result<CpuExpertWeights> CpuExpertWeights::load(const MoeProblem& problem,
                                                const CpuWeightFormats& formats,
                                                ExpertSource& source, int num_threads) {
  const bool gated = is_gated(problem.activation.kind);
  const cpu::PackedShape shape13 =
      formats.w13.shape(gated ? cpu::RowOrder::kGateUp : cpu::RowOrder::kPlain, w13_rows(problem),
                        problem.hidden_size);
  const cpu::PackedShape shape2 =
      formats.w2.shape(cpu::RowOrder::kPlain, problem.hidden_size, problem.intermediate_size);
  const std::int64_t num_experts = problem.num_local_experts;
  const bool bias = problem.has_expert_bias, perm = problem.quant.weight.act_order;
  CpuExpertWeights w;
  MOESAIC_ASSIGN_OR_RETURN(w.w13,
                           CpuProjection::allocate(formats.w13, shape13, num_experts, bias, perm));
  MOESAIC_ASSIGN_OR_RETURN(w.w2,
                           CpuProjection::allocate(formats.w2, shape2, num_experts, bias, perm));
  FormedMatrix formed;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(e));
    MOESAIC_RETURN_IF_ERROR(check_expert_weights(problem, view, e));
    const auto set = [&](CpuProjection& to, std::string_view field, const ProjectionView& from,
                         const OperandQuant& form) -> Status {
      MOESAIC_ASSIGN_OR_RETURN(const ProjectionView held,
                               formed.narrow(problem.quant.weight, form, e, field, from));
      return to.set_expert(e, field, held, num_threads);
    };
    MOESAIC_RETURN_IF_ERROR(set(w.w13, "w13", w13_of(view), formats.held.w13));
    MOESAIC_RETURN_IF_ERROR(set(w.w2, "w2", w2_of(view), formats.held.w2));
  }
  return w;
}

}  // namespace moesaic::experts
