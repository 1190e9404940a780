#include "experts/cuda_general/general_plan.h"

#include <fmt/format.h>

#include "core/checked.h"
#include "core/refusal.h"
#include "experts/cuda_general/general_kernels.h"
#include "experts/cuda_general/row_values.h"
#include "experts/problem_checks.h"
#include "experts/sm90/experts_plan.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {
namespace {

std::int64_t chunks(std::int64_t columns) { return ceil_div(columns, kGeneralChunk); }

Status check_general_pointer(std::string_view field, const void* p, std::int64_t alignment) {
  if (p == nullptr) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got null, need a device pointer", field)};
  }
  if (reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(alignment) != 0) {
    return {StatusCode::kInvalidLayout,
            fmt::format("{}: got an address that is not a multiple of {}", field, alignment)};
  }
  return {};
}

}  // namespace

Status general_experts_take(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  if (problem.num_local_experts > kMaxAlignedExperts) {
    return unsupported(fmt::format("num_local_experts: got {}, need at most {}",
                                   problem.num_local_experts, kMaxAlignedExperts));
  }
  MOESAIC_RETURN_IF_ERROR(check_row_count(problem));
  for (const auto& [name, size] : {std::pair{"hidden_size", problem.hidden_size},
                                   std::pair{"intermediate_size", problem.intermediate_size}}) {
    // The second dimension of a grid has 65535 blocks at most, of 64 channels.
    if (size > 65535 * (kGeneralTileRows / 2)) {
      return unsupported(
          fmt::format("{}: got {}, need at most {}", name, size, 65535 * (kGeneralTileRows / 2)));
    }
  }
  return {};
}

GeneralPlan::GeneralPlan(const MoeProblem& p)
    : operand(quant::operand_dtype(p.activation_dtype, p.quant.kind)),
      quantizes(p.quant.kind == ComputeScheme::kFp8Block),
      values(quantizes ? std::nullopt : value_rule(p.quant.activation)),
      reorders(values.has_value() && p.quant.weight.act_order),
      rows_by_pair(!has_slabs(p) && (quantizes || values) &&
                   (p.apply_router_weight_on_input || reorders || (values && values->fixed))),
      w13_rows(experts::w13_rows(p)),
      hidden(p.hidden_size),
      inner(p.intermediate_size) {
  const OperandQuant& w = p.quant.weight;
  const bool plain = w.granularity == ScaleGranularity::kNone &&
                     w.outer_scale == OuterScale::kNone &&
                     (w.dtype == DType::kF32 || w.dtype == DType::kBF16 || w.dtype == DType::kF16);
  decodes = !plain && !quantizes;
  weight = decodes ? DType::kF32 : w.dtype;
}

std::int64_t GeneralPlan::stride(std::int64_t columns) const {
  return round_up(columns, 128 / dtype_bits(weight));
}

std::int32_t GeneralPlan::rows_per_record(std::int64_t pairs, std::int64_t experts) {
  return pairs > 4 * kFewRows * experts ? kManyRows : kFewRows;
}

GeneralWorkspace GeneralWorkspace::carve(const MoeProblem& problem, const GeneralPlan& plan,
                                         std::int64_t tokens, Arena& arena) {
  GeneralWorkspace w;
  w.pairs = tokens * problem.top_k;
  w.rows = plan.rows_by_pair ? w.pairs : tokens;
  // The narrowest group makes the most records.
  w.max_groups = max_group_records(w.pairs, problem.num_local_experts, kFewRows);
  w.control = arena.take<std::uint32_t>(3);
  w.group_done = arena.take<std::uint32_t>(w.max_groups);
  w.band_done = arena.take<std::uint32_t>(1);
  w.groups = arena.take<GroupRecord>(w.max_groups);
  w.pair_of_row = arena.take<std::int32_t>(w.pairs);
  if (!has_slabs(problem)) {
    w.row_of_pair = arena.take<std::int32_t>(w.pairs);
    w.weight_of_row = arena.take<float>(w.pairs);
  }
  if (plan.quantizes) {
    w.codes = arena.take<std::uint8_t>(w.rows * plan.hidden);
    w.scale = arena.take<float>(w.rows * chunks(plan.hidden));
    w.inner_codes = arena.take<std::uint8_t>(w.pairs * plan.inner);
    w.inner_scale = arena.take<float>(w.pairs * chunks(plan.inner));
  }
  if (plan.values) {
    w.values = arena.take<float>(w.rows * plan.hidden);
    w.inner_values = arena.take<float>(w.pairs * plan.inner);
    if (plan.values->fixed) w.call_scales = arena.take<float>(2 * problem.num_local_experts);
  }
  w.inner = arena.take<std::byte>(w.pairs * plan.inner * (dtype_bits(plan.operand) / 8));
  if (!has_slabs(problem)) w.y = arena.take<float>(w.pairs * plan.hidden);
  return w;
}

Result<std::int64_t> general_workspace_size(const MoeProblem& problem, std::int64_t tokens) {
  if (tokens < 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
  }
  MOESAIC_RETURN_IF_ERROR(general_experts_take(problem));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_of_tokens(problem, tokens));
  Arena arena = Arena::measure();
  GeneralWorkspace::carve(problem_of_rows(problem), GeneralPlan(problem), rows, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

Status check_general_args(const MoeProblem& problem, const CudaExpertsArgs& a) {
  if (a.tokens < 0 || a.tokens > problem.max_tokens) {
    return {a.tokens < 0 ? StatusCode::kInvalidArgument : StatusCode::kLimitExceeded,
            fmt::format("tokens: got {}, planned for 0 .. {}", a.tokens, problem.max_tokens)};
  }
  if (a.top_k < 0 || a.top_k > problem.top_k) {
    return {StatusCode::kInvalidArgument,
            fmt::format("top_k: got {}, planned for at most {}", a.top_k, problem.top_k)};
  }
  const bool slots = a.result.kind == CudaResult::Kind::kSlots;
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(slots ? "slot_rows" : "output", a.result.dtype));
  if (a.tokens == 0) return {};
  const bool codes = a.rows.kind == CudaRows::Kind::kCodes;
  if (a.brings_scales() && !quant::has_static_scale(problem.quant.activation)) {
    return unsupported(
        "x_scales, inner_scales: got scales of a call, need a scheme with stored ones");
  }
  if (a.pair_capacity != 0) {
    return unsupported(fmt::format("pair_capacity: got {}, need 0", a.pair_capacity));
  }
  if (a.rows.kind == CudaRows::Kind::kKept || a.in_front) {
    return unsupported("rows: got ones that a call in front has made, need hidden states");
  }
  if (codes && problem.quant.kind != ComputeScheme::kFp8Block) {
    return unsupported(fmt::format("hidden_scale: got quantised rows, need values for {}",
                                   compute_scheme_name(problem.quant.kind)));
  }
  if (codes) {
    MOESAIC_RETURN_IF_ERROR(check_general_pointer("hidden_scale", a.rows.scale, 4));
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_of_tokens(problem, a.tokens));
    if (a.rows.scale_stride < rows) {
      return {
          StatusCode::kInvalidLayout,
          fmt::format("hidden_scale stride: got {}, need at least {}", a.rows.scale_stride, rows)};
    }
  } else {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", a.rows.dtype));
  }
  const std::int64_t element = codes ? 1 : dtype_bits(a.rows.dtype) / 8;
  MOESAIC_RETURN_IF_ERROR(check_general_pointer("hidden_states", a.rows.data, element));
  MOESAIC_RETURN_IF_ERROR(check_format_of_call(problem, a));
  MOESAIC_RETURN_IF_ERROR(check_general_pointer(slots ? "slot_rows" : "output", a.result.data,
                                                dtype_bits(a.result.dtype) / 8));
  if (a.result.shared_rows != nullptr) {
    MOESAIC_RETURN_IF_ERROR(check_general_pointer("shared_rows", a.result.shared_rows, 2));
  }
  return check_general_pointer("workspace", a.workspace, 256);
}

}  // namespace moesaic::cuda
