#include "experts/cpu/workspace.h"

#include <algorithm>

namespace moesaic::experts {
std::int64_t CpuPlan::chunk_tokens(std::int64_t tokens) const {
  const std::int64_t per_token = standard ? std::max<std::int64_t>(top_k, 1) : 1;
  return std::min(tokens, std::max<std::int64_t>(1, max_chunk_rows / per_token));
}

CpuWorkspace CpuWorkspace::carve(const CpuPlan& plan, std::int64_t tokens, Arena& arena) {
  const std::int64_t chunk = plan.chunk_tokens(tokens);
  const std::int64_t rows = plan.chunk_rows(tokens);
  CpuWorkspace w;
  const bool of_slots = plan.own_rows || plan.spaced_rows || plan.static_rows;
  const std::int64_t inputs = of_slots ? rows : chunk;
  const std::int64_t a1_bytes = inputs * plan.row_pitch(plan.gemm1);
  if (plan.spaced_rows) {
    // GEMM2 writes its output when nobody reads GEMM1's operands any more.
    w.out = arena.take<float>(std::max(rows * plan.n2, ceil_div(a1_bytes, std::int64_t{4})));
    w.a1 = reinterpret_cast<std::byte*>(w.out);
  } else {
    w.out = arena.take<float>(rows * plan.n2);
    w.a1 = arena.take<std::byte>(a1_bytes);
  }
  w.a2 = arena.take<std::byte>(rows * plan.row_pitch(plan.gemm2));
  if (plan.row_numbers()) {
    w.a1_numbers = arena.take<float>(inputs * plan.numbers(plan.gemm1));
    w.a2_numbers = arena.take<float>(rows * plan.numbers(plan.gemm2));
  }
  if (plan.e2m1_groups) {
    w.a1_groups = arena.take<cpu::E2M1Group>(inputs * plan.e2m1_groups1());
    w.a2_groups = arena.take<cpu::E2M1Group>(rows * plan.e2m1_groups2());
  }
  if (plan.whole_rows) w.a2_raw = arena.take<float>(rows * plan.gemm2.k);
  w.sorted_slots = arena.take<std::int32_t>(rows);
  w.position = arena.take<std::int32_t>(rows);
  w.first_row = arena.take<std::int64_t>(plan.num_local_experts + 1);
  w.active = arena.take<std::int32_t>(plan.num_local_experts);
  w.scratch_stride = round_up(std::max({plan.gemm1.k, plan.gemm2.k, plan.n2}), 16);
  w.scratch = arena.take<float>(2 * w.scratch_stride * plan.num_threads);
  for (const CpuGemm* const gemm : {&plan.gemm1, &plan.gemm2}) {
    if (!gemm->super_scales) continue;
    const std::int64_t steps = std::min(gemm->k, plan.super_scale_steps);
    const std::int64_t numbers = steps / gemm->fold * (gemm->row_sums ? 2 : 1);
    w.scales_stride = std::max(w.scales_stride, numbers * cpu::kPanelColumns);
  }
  if (w.scales_stride > 0) w.scales = arena.take<float>(w.scales_stride * plan.num_threads);
  return w;
}

}  // namespace moesaic::experts
