// What the GPU experts take and need, decided without a device: part of every build.
#include <fmt/format.h>

#include "core/arena.h"
#include "core/checked.h"
#include "core/refusal.h"
#include "experts/padded_source.h"
#include "experts/problem_checks.h"
#include "experts/sm90/experts.h"
#include "experts/sm90/experts_plan.h"
#include "permute/sm90/align.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {
bool CudaExperts::takes_any_rows_of(const MoeProblem& problem) {
  const auto format = format_of(problem);
  return format.ok() && row_has_wide_result((*format)->rows);
}

Status CudaExperts::can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  MOESAIC_ASSIGN_OR_RETURN(const FormatRow* const format, format_of(problem));
  const bool wide = row_has_wide_result(format->rows);
  if (!wide && problem.activation_dtype != DType::kBF16) {
    return unsupported(
        fmt::format("activation_dtype: got {}, need BF16", dtype_name(problem.activation_dtype)));
  }
  if (wide && has_slabs(problem)) {
    return unsupported(fmt::format("format: got batched with {}, need standard",
                                   compute_scheme_name(problem.quant.kind)));
  }
  // The bytes of a row are counted in 31 bits, those of a result in F32 too.
  constexpr std::int64_t kMostColumns = (std::int64_t{1} << 29) - 1;
  if (problem.hidden_size > kMostColumns) {
    return unsupported(
        fmt::format("hidden_size: got {}, need at most {}", problem.hidden_size, kMostColumns));
  }
  const MoeProblem of_rows = problem_of_rows(problem);
  if (of_rows.apply_router_weight_on_input && of_rows.top_k > 1) {
    return unsupported(fmt::format(
        "top_k: got {} with apply_router_weight_on_input, need 1 (a row is made once for all of "
        "its experts)",
        problem.top_k));
  }
  MOESAIC_RETURN_IF_ERROR(check_activation(*format, problem));
  MOESAIC_RETURN_IF_ERROR(
      format->check(experts::with_padded_width(of_rows, format->inner_multiple)));
  if (problem.num_local_experts > kMaxAlignedExperts) {
    return unsupported(fmt::format("num_local_experts: got {}, need at most {}",
                                   problem.num_local_experts, kMaxAlignedExperts));
  }
  return check_row_count(problem);
}

Status check_row_count(const MoeProblem& problem) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const std::int64_t each = has_slabs(problem) ? problem.num_local_experts : problem.top_k;
  const auto pairs = checked_mul(problem.max_tokens, each);
  if (pairs && *pairs <= kMost) return {};
  if (has_slabs(problem)) {
    return unsupported(
        fmt::format("max_tokens: got {} rows for each of {} local experts, need at most 2^30 rows",
                    problem.max_tokens, each));
  }
  return unsupported(fmt::format("max_tokens: got {} of {} experts each, need at most 2^30 pairs",
                                 problem.max_tokens, each));
}

namespace {

// The kernel gathers rows by offsets of 32 bits, of 16 bytes each.
Status check_gathered_rows(std::string_view what, std::int64_t rows, std::int64_t row_bytes) {
  constexpr std::int64_t kMost = std::int64_t{1} << 36;
  const auto bytes = checked_mul(rows, row_bytes);
  if (bytes && *bytes <= kMost) return {};
  return unsupported(fmt::format("max_tokens: got {} {} of {} bytes each, need at most 2^36 bytes",
                                 rows, what, row_bytes));
}

}  // namespace

Result<std::int64_t> CudaExperts::workspace_size(const MoeProblem& problem, std::int64_t tokens,
                                                 std::int64_t capacity) {
  if (tokens < 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
  }
  MOESAIC_RETURN_IF_ERROR(can_implement(problem));
  MOESAIC_ASSIGN_OR_RETURN(const MoeProblem fitted, fitted_problem(problem));
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsPlan plan, make_experts_plan(fitted));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_of_tokens(problem, tokens));
  const ExpertsWorkspace w =
      ExpertsWorkspace::carve(problem_of_rows(fitted), plan, rows, capacity, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const bool by_pair = plan.static_scales || plan.gathers_rows();
  MOESAIC_RETURN_IF_ERROR(check_gathered_rows("rows of hidden states",
                                              by_pair ? rows * problem_of_rows(fitted).top_k : rows,
                                              plan.w13.row_bytes()));
  MOESAIC_RETURN_IF_ERROR(
      check_gathered_rows("rows of the intermediate", w.listed_rows, plan.w2.row_bytes()));
  return arena.used();
}

namespace {

Status check_pointer(std::string_view field, const void* p, std::uintptr_t alignment) {
  if (p == nullptr) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got null, need a device pointer", field)};
  }
  if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0) {
    return {StatusCode::kInvalidLayout,
            fmt::format("{}: got an address that is not a multiple of {}", field, alignment)};
  }
  return {};
}

bool takes_codes(const FormatRow& row) { return row.rows == RowForm::kFp8Group128; }
bool quantises(const FormatRow& row) { return row_is_quantised(row.rows); }

Status check_scales(const ExpertsPlan& plan, const CudaExpertsArgs& a, std::int64_t rows) {
  if (!takes_codes(*plan.format)) {
    return {StatusCode::kUnsupported,
            fmt::format("hidden_scale: got quantised rows, need bf16 rows: only {} takes codes",
                        names_of_formats(&takes_codes))};
  }
  if (a.rows.scale_stride < rows) {
    return {StatusCode::kInvalidLayout, fmt::format("hidden_scale stride: got {}, need at least {}",
                                                    a.rows.scale_stride, rows)};
  }
  return check_pointer("hidden_scale", a.rows.scale, 4);
}

// A list with a capacity is one in memory, whose slots are added up by someone who knows of it.
Status check_capacity(const MoeProblem& problem, const CudaExpertsArgs& a) {
  const std::int64_t top_k = a.top_k > 0 ? a.top_k : problem.top_k;
  if (a.pair_capacity < 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("pair_capacity: got {}, need >= 0", a.pair_capacity)};
  }
  if (a.tokens * top_k > kComparedPairs && a.result.kind == CudaResult::Kind::kSlots &&
      a.result.dtype == DType::kBF16 && !has_slabs(problem) && !a.in_front) {
    return {};
  }
  return {StatusCode::kUnsupported,
          fmt::format("pair_capacity: got {}, need bf16 slots of more than {} pairs",
                      a.pair_capacity, kComparedPairs)};
}

Status check_dtypes(const ExpertsPlan& plan, const CudaExpertsArgs& a) {
  const bool values = a.rows.kind == CudaRows::Kind::kValues;
  const DType slots = plan.wide() ? DType::kF32 : DType::kBF16, to = a.result.dtype;
  if (a.result.kind == CudaResult::Kind::kSlots && to != slots) {
    return {StatusCode::kInvalidDType,
            fmt::format("slot_rows: got {}, need {}", dtype_name(to), dtype_name(slots))};
  }
  if (plan.wide()) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", to));
    return values ? expect_float_dtype("hidden_states", a.rows.dtype) : Status();
  }
  if (to != DType::kBF16 && to != DType::kF32) {
    return {StatusCode::kInvalidDType,
            fmt::format("output: got {}, need BF16 or F32", dtype_name(to))};
  }
  if (values && a.rows.dtype != DType::kBF16) {
    return {StatusCode::kInvalidDType,
            fmt::format("hidden_states: got {}, need BF16", dtype_name(a.rows.dtype))};
  }
  return {};
}

}  // namespace

Status check_format_of_call(const MoeProblem& problem, const CudaExpertsArgs& a) {
  if (!has_slabs(problem)) {
    MOESAIC_RETURN_IF_ERROR(check_pointer("topk_ids", a.topk_ids, 4));
    return check_pointer("topk_weights", a.topk_weights, 4);
  }
  if (a.top_k != 0 || a.in_front || a.rows.kind == CudaRows::Kind::kKept ||
      a.result.kind != CudaResult::Kind::kSlots || a.result.shared_rows != nullptr) {
    return {StatusCode::kUnsupported,
            "format: got top_k, a kernel in front, kept rows, sums or shared rows, need rows and "
            "results in slabs"};
  }
  return check_pointer("expert_num_tokens", a.slab_counts, 4);
}

Status check_args(const MoeProblem& problem, const ExpertsPlan& plan, const CudaExpertsArgs& a) {
  if (a.tokens < 0 || a.tokens > problem.max_tokens) {
    return {a.tokens < 0 ? StatusCode::kInvalidArgument : StatusCode::kLimitExceeded,
            fmt::format("tokens: got {}, planned for 0 .. {}", a.tokens, problem.max_tokens)};
  }
  if (a.top_k < 0 || a.top_k > problem.top_k) {
    return {StatusCode::kInvalidArgument,
            fmt::format("top_k: got {}, planned for at most {}", a.top_k, problem.top_k)};
  }
  const bool slots = a.result.kind == CudaResult::Kind::kSlots;
  MOESAIC_RETURN_IF_ERROR(check_dtypes(plan, a));
  if (a.tokens == 0) return {};
  if (a.pair_capacity != 0) MOESAIC_RETURN_IF_ERROR(check_capacity(problem, a));
  MOESAIC_RETURN_IF_ERROR(check_pointer("hidden_states", a.rows.data, 16));
  MOESAIC_RETURN_IF_ERROR(check_format_of_call(problem, a));
  MOESAIC_RETURN_IF_ERROR(check_pointer(slots ? "slot_rows" : "output", a.result.data, 16));
  if (a.rows.kind == CudaRows::Kind::kCodes) {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_of_tokens(problem, a.tokens));
    MOESAIC_RETURN_IF_ERROR(check_scales(plan, a, rows));
  }
  if (a.brings_scales() && (!plan.static_scales || a.in_front)) {
    return {StatusCode::kUnsupported,
            "x_scales, inner_scales: got scales of a call, need a scheme with static ones, and a "
            "call that runs its own prologue"};
  }
  if (a.brings_scales() && plan.format->rows == RowForm::kNv4Values) {
    return {StatusCode::kUnsupported,
            "a1_scale, a2_scale: got scales of a call for nvfp4, need those that the experts were "
            "made with, which are in their weights' factors (backend cuda_general takes others)"};
  }
  const bool keeps = plan.quantizes() && !plan.weight_on_input && !plan.static_scales;
  if (a.rows.kind == CudaRows::Kind::kKept && !keeps) {
    return {StatusCode::kUnsupported,
            fmt::format("rows: got kept ones, need {} experts that quantised bf16 rows without "
                        "weights or static scales",
                        names_of_formats(&quantises))};
  }
  if (a.result.shared_rows != nullptr) {
    MOESAIC_RETURN_IF_ERROR(check_pointer("shared_rows", a.result.shared_rows, 16));
  }
  return check_pointer("workspace", a.workspace, 256);
}

}  // namespace moesaic::cuda
