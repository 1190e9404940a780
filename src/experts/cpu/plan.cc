#include "experts/cpu/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/arena.h"
#include "core/checked.h"
#include "cpu/team.h"
#include "cpu/tiers.h"

namespace moesaic::experts {
namespace {

using cpu::kPanelColumns;
using cpu::OperandKind;

// What rows carry besides their values, see CpuPlan.
void plan_rows(const MoeProblem& problem, const CpuWeightFormat& format, CpuPlan& plan) {
  using cpu::RowQuantRule;
  plan.row_rule = cpu_row_rule(problem.quant.activation);
  plan.power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
  plan.static_rows = format.static_rows;
  const bool token = problem.quant.activation.granularity == ScaleGranularity::kToken;
  const bool group = problem.quant.activation.granularity == ScaleGranularity::kGroup;
  plan.scaled_operands =
      group && format.grouped && problem.quant.activation.scale_format != ScaleFormat::kF32;
  if (plan.scaled_operands && plan.row_rule == RowQuantRule::kFp8Group)
    plan.row_rule = RowQuantRule::kFp8GroupPow2;
  plan.row_scales = token || (group && !plan.scaled_operands);
  if (group) plan.row_step = problem.quant.activation.block_k;
  plan.permuted = problem.quant.weight.act_order;
  // GEMM1 leaves the intermediate in blocks of 128 columns: a scale of more, or of some of two
  // blocks, waits for the row.
  const bool across = group && cpu::kGroup % plan.row_step != 0;
  plan.whole_rows = token || plan.permuted || across;
}

CpuGemm plan_gemm(const CpuPlan& plan, const OperandQuant& activation,
                  const CpuWeightFormat& format, std::int64_t columns) {
  CpuGemm gemm;
  gemm.k = format.shape(cpu::RowOrder::kPlain, 1, columns).padded_k();
  gemm.fold = format.fold;
  if (activation.granularity == ScaleGranularity::kGroup && format.grouped)
    gemm.folds_per_row_scale = static_cast<int>(plan.row_step / format.fold);
  gemm.row_sums = format.group_offsets;
  gemm.super_scales = format.super.bits != 0;
  return gemm;
}

bool has_e2m1_groups(const CpuPlan& plan, const CpuWeightFormat& format,
                     const cpu::CpuKernels& kernels) {
  return kernels.grouped_gemm_e2m1 != nullptr && plan.kind == ComputeScheme::kNvfp4 &&
         plan.row_rule == cpu::RowQuantRule::kNvfp4 && plan.scaled_operands && !plan.whole_rows &&
         format.kind == cpu::WeightKind::kCode4 && format.fold == cpu::kE2M1GroupSteps &&
         format.group_scales == cpu::GroupScaleForm::kE4M3 && !format.group_offsets;
}

}  // namespace

CpuPlan make_cpu_plan(const MoeProblem& problem, const CpuWeightFormats& formats,
                      const cpu::CpuKernels& kernels) {
  // Forms differ in codes and their groups only.
  const CpuWeightFormat& format = formats.w13;
  CpuPlan plan;
  plan.kind = problem.quant.kind;
  plan.standard = problem.format == ActivationFormat::kStandard;
  plan_rows(problem, format, plan);
  plan.round_dtype = plan.kind == ComputeScheme::kFp8Bf16
                         ? DType::kBF16
                         : quant::operand_dtype(problem.activation_dtype, plan.kind);
  // Every code of 8 bits or less and every bf16 value is exact as a bf16 operand.
  const bool narrow = plan.row_rule != cpu::RowQuantRule::kNone || plan.round_dtype == DType::kBF16;
  plan.operand = narrow ? kernels.narrow_operand : OperandKind::kF32;
  if (format.integer_products) plan.operand = OperandKind::kI8;
  plan.super_scale_steps = kernels.super_scale_steps;
  plan.max_chunk_rows = kernels.chunk_rows;
  plan.e2m1_groups = plan.operand == OperandKind::kBF16 && has_e2m1_groups(plan, format, kernels);
  plan.top_k = problem.top_k;
  plan.own_rows =
      plan.permuted || (plan.standard && problem.apply_router_weight_on_input && problem.top_k > 1);
  const auto is_whole = [](const CpuWeightFormat& f) {
    return f.kind == cpu::WeightKind::kI8Quads && f.group_scales == cpu::GroupScaleForm::kNone &&
           !f.group_offsets;
  };
  const bool whole_integers = is_whole(formats.w13) && is_whole(formats.w2);
  plan.pads_rows =
      kernels.reads_spaced_rows &&
      (plan.operand == OperandKind::kBF16 || (plan.operand == OperandKind::kI8 && whole_integers));
  plan.spaced_rows = plan.pads_rows && !plan.e2m1_groups && plan.standard && problem.top_k > 1;
  plan.num_local_experts = problem.num_local_experts;
  plan.hidden = problem.hidden_size;
  plan.intermediate = problem.intermediate_size;
  const OperandQuant& rows = problem.quant.activation;
  plan.gemm1 = plan_gemm(plan, rows, formats.w13, problem.hidden_size);
  plan.gemm2 = plan_gemm(plan, rows, formats.w2, problem.intermediate_size);
  plan.n2 = round_up(problem.hidden_size, kPanelColumns);
  plan.num_threads = cpu::resolve_threads(problem.num_threads);
  const bool gated = is_gated(problem.activation.kind);
  const std::int64_t columns = problem.intermediate_size * (gated ? 2 : 1);
  const auto order = gated ? cpu::RowOrder::kGateUp : cpu::RowOrder::kPlain;
  plan.columns1 = columns;
  plan.expert_bytes =
      formats.w13.shape(order, columns, problem.hidden_size).matrix_bytes() +
      formats.w2.shape(cpu::RowOrder::kPlain, problem.hidden_size, problem.intermediate_size)
          .matrix_bytes();
  return plan;
}

int CpuPlan::team(std::int64_t rows, std::int64_t experts) const {
  const auto per_row = static_cast<double>(hidden) * static_cast<double>(columns1 + intermediate);
  const double us =
      cpu::one_thread_us(static_cast<double>(experts) * static_cast<double>(expert_bytes),
                         static_cast<double>(rows) * per_row);
  return cpu::team_size(us, num_threads);
}

int CpuPlan::team_of_tokens(std::int64_t tokens) const {
  const std::int64_t rows = chunk_rows(tokens);
  return team(rows, std::min(rows, num_local_experts));
}

Result<std::int64_t> cpu_workspace_bytes(const CpuPlan& plan, std::int64_t tokens) {
  if (tokens < 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
  }
  const std::int64_t rows = plan.standard ? tokens : tokens * plan.num_local_experts;
  Arena arena = Arena::measure();
  CpuWorkspace::carve(plan, rows, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

}  // namespace moesaic::experts
