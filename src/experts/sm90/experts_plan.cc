#include "experts/sm90/experts_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/checked.h"
#include "experts/problem_checks.h"
#include "experts/sm90/weight_codes.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {

Result<ExpertsPlan> make_experts_plan(const MoeProblem& problem) {
  ExpertsPlan plan;
  MOESAIC_ASSIGN_OR_RETURN(plan.format, format_of(problem));
  const ActivationKind kind = problem.activation.kind;
  plan.epilogue = epilogue_of(*plan.format, kind);
  const std::int64_t element = row_element_bytes(plan.format->rows);
  const std::int64_t slab = plan.format->slab_bytes;
  plan.w13 = {{experts::w13_rows(problem), problem.hidden_size, element, is_gated(kind)}, slab};
  plan.w2 = {{problem.hidden_size, problem.intermediate_size, element, false}, slab};
  plan.weight = problem.quant.weight;
  plan.forms = {plan.weight, plan.weight};
  if (plan.format->takes_w2 != nullptr) plan.forms = *problem.quant.forms;
  plan.set_image(false);
  plan.power_of_two_scales = problem.quant.activation.scale_format == ScaleFormat::kE8M0;
  plan.weight_on_input = problem_of_rows(problem).apply_router_weight_on_input;
  plan.static_scales = quant::has_static_scale(problem.quant.activation);
  return plan;
}

void ExpertsPlan::set_image(bool exact_scales) {
  if (format->image == nullptr) return;
  codes = format->image(forms.w13, exact_scales);
  codes2 = format->image(forms.w2, exact_scales);
  w13.slab_bytes = codes.slab_bytes;
  w2.slab_bytes = codes2.slab_bytes;
}

void ExpertsPlan::fill_sizes(const MoeProblem& problem, GroupedParams& to) const {
  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  to.top_k = narrow(problem.top_k);
  to.hidden = narrow(problem.hidden_size);
  to.intermediate = narrow(problem.intermediate_size);
  to.bands1 = narrow(w13.bands());
  to.bands2 = narrow(w2.bands());
  to.slabs1 = narrow(w13.slabs());
  to.slabs2 = narrow(w2.slabs());
  to.chunks1 = narrow(w13.chunks());
  to.chunks2 = narrow(w2.chunks());
  to.row_bytes1 = narrow(w13.row_bytes());
  to.row_bytes2 = narrow(w2.row_bytes());
  to.codes = codes;
  to.codes2 = codes2;
  to.chunks_of_sums = chunks_of_sums(weight);
}

Result<std::int64_t> rows_of_tokens(const MoeProblem& problem, std::int64_t tokens) {
  if (!has_slabs(problem)) return tokens;
  const auto rows = checked_mul(tokens, problem.num_local_experts);
  if (rows) return *rows;
  return Status(StatusCode::kLimitExceeded,
                fmt::format("tokens: got {} for each of {} local experts, need at most 2^63-1",
                            tokens, problem.num_local_experts));
}

ExpertsWorkspace ExpertsWorkspace::carve(const MoeProblem& problem, const ExpertsPlan& plan,
                                         std::int64_t tokens, std::int64_t capacity, Arena& arena) {
  ExpertsWorkspace w;
  const std::int64_t pairs = tokens * problem.top_k;
  const std::int64_t listed = capacity > 0 ? std::min(pairs, capacity) : pairs;
  const std::int64_t local = problem.num_local_experts;
  // First, where another call with as many tokens has them: see CudaRows::kept.
  w.row_scale_stride = round_up(tokens, 4);
  const bool whole = row_is_whole(plan.format->rows);
  if (plan.makes_rows() || plan.gathers_rows() || plan.half_rows()) {
    const bool by_pair = plan.static_scales || plan.gathers_rows();
    w.rows = arena.take<std::byte>((by_pair ? pairs : tokens) * plan.w13.row_bytes());
  }
  const bool scales = row_has_scales(plan.format->rows) && !plan.static_scales;
  if (scales) {
    w.row_scale = arena.take<float>(w.row_scale_stride * (whole ? 1 : plan.w13.chunks()));
  }
  // The narrowest group makes the most records.
  w.max_groups = max_group_records(listed, local, kSplitColumns);
  w.control = arena.take<std::uint32_t>(3);
  w.group_done = arena.take<std::uint32_t>(w.max_groups);
  const std::int64_t late_rows = plan.quantizes_late() ? listed : 0;
  w.band_done = arena.take<std::uint32_t>(2 * plan.w2.bands() + late_rows);
  if (w.band_done != nullptr) {
    w.inner_amax = w.band_done + 2 * plan.w2.bands();
    w.counter_words = static_cast<std::int32_t>(w.inner_amax - w.control + late_rows);
  }
  w.groups = arena.take<GroupRecord>(w.max_groups);
  // With a capacity also the numbers of the list's own rows.
  w.pair_of_row = arena.take<std::int32_t>(capacity > 0 ? 2 * listed : listed);
  w.listed_rows = listed;
  if (!has_slabs(problem)) {
    w.row_of_pair = arena.take<std::int32_t>(pairs);
    w.weight_of_row = arena.take<float>(listed);
  }
  w.inner_scale_stride = round_up(listed, 4);
  if (scales) {
    w.inner_scale = arena.take<float>(w.inner_scale_stride * (whole ? 1 : plan.w2.chunks()));
  }
  if (plan.quantizes_late()) {
    w.inner_bf16 = arena.take<std::byte>(listed * problem.intermediate_size * 2);
  }
  w.inner = arena.take<std::byte>(listed * plan.w2.row_bytes());
  if (!has_slabs(problem)) {
    w.y2 = arena.take<std::byte>(listed * problem.hidden_size * (plan.wide() ? 4 : 2));
  }
  if (plan.static_scales) w.call_scales = arena.take<float>(2 * local);
  return w;
}

}  // namespace moesaic::cuda
