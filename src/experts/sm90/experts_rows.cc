// What a call launches in front of the grouped GEMMs: scales that it brings, the work list, the
// operand rows of GEMM1.
#include "core/fault.h"
#include "cuda/device_memory.h"
#include "cuda/quant_rows.h"
#include "experts/sm90/call_lists.h"
#include "experts/sm90/call_scales.h"
#include "experts/sm90/experts_impl.h"
#include "experts/sm90/gather_rows.h"
#include "experts/sm90/half_rows.h"

namespace moesaic::cuda {

QuantRowsParams CudaExperts::Impl::quant_params(const CudaExpertsArgs& a,
                                                const ExpertsWorkspace& w) const {
  QuantRowsParams q;
  q.x = static_cast<const std::uint16_t*>(a.rows.data);
  q.weights = plan.weight_on_input ? a.topk_weights : nullptr;
  q.tokens = a.tokens;
  q.columns = problem.hidden_size;
  q.power_of_two_scales = plan.power_of_two_scales;
  q.form = plan.format->rows;
  q.q = w.rows;
  q.scale = w.row_scale;
  q.scale_stride = w.row_scale_stride;
  if (!plan.static_scales) return q;
  q.static_scales.of = x_static(a, w);
  if (!rows_per_pair(a) || has_slabs(problem)) return q;  // slabs say whose a row is
  q.static_scales.topk_ids = a.topk_ids;
  q.static_scales.expert_map = a.expert_map;
  q.static_scales.num_experts = static_cast<std::int32_t>(problem.num_experts);
  q.static_scales.num_local_experts = static_cast<std::int32_t>(problem.num_local_experts);
  q.static_scales.top_k = static_cast<std::int32_t>(a.top_k > 0 ? a.top_k : problem.top_k);
  return q;
}

Status CudaExperts::Impl::make_rows(void* stream, const CudaExpertsArgs& a,
                                    const MoeProblem& of_rows, const ExpertsWorkspace& w,
                                    std::int32_t rows_per_record) const {
  if (a.brings_scales() && !MOESAIC_FAULT(cuda_call_scales_not_taken)) {
    CallScalesParams s;
    s.given[0] = a.x_scales;
    s.given[1] = a.inner_scales;
    s.experts = of_rows.num_local_experts;
    s.to = w.call_scales;
    MOESAIC_RETURN_IF_ERROR(check_call("static scales", launch_call_scales(s, stream)));
  }
  const QuantRowsParams q = quant_params(a, w);
  const bool quantize = plan.makes_rows() && a.rows.kind == CudaRows::Kind::kValues;
  const QuantRowsParams* const quant = quantize ? &q : nullptr;
  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  const std::int32_t bands = narrow(2 * plan.w2.bands());
  if (has_slabs(of_rows)) {
    BatchedListParams list = list_of_slabs(of_rows, a, w, rows_per_record);
    list.bands = bands;
    list.zero_rows = plan.quantizes_late();
    MOESAIC_RETURN_IF_ERROR(
        check_call("list and quantize", launch_batched_list(list, quant, traits, stream)));
  } else if (!a.in_front) {
    AlignParams list = list_of_pairs(of_rows, a, w, rows_per_record);
    // What is zeroed with them lies behind.
    std::int32_t rows = list.pairs;
    if (a.pair_capacity > 0) {
      rows = list.capacity = narrow(w.listed_rows);
    }
    list.bands = bands + (plan.quantizes_late() ? rows : 0);
    MOESAIC_RETURN_IF_ERROR(
        check_call("align and quantize", launch_align(list, quant, traits, stream)));
  }
  if (makes_half_rows(a)) {
    HalfRowsParams half;
    half.x = a.rows.data;
    half.dtype = a.rows.dtype;
    half.weights = plan.weight_on_input ? a.topk_weights : nullptr;
    half.tokens = a.tokens;
    half.columns = problem.hidden_size;
    half.rows = reinterpret_cast<std::uint16_t*>(w.rows);
    return check_call("rows in F16", launch_half_rows(half, stream));
  }
  if (!plan.gathers_rows()) return {};
  GatherRowsParams gather;
  gather.x = static_cast<const std::uint16_t*>(a.rows.data);
  gather.rows = reinterpret_cast<std::uint16_t*>(w.rows);
  gather.perm = weights.w13_perm;
  gather.topk_ids = a.topk_ids;
  gather.expert_map = a.expert_map;
  gather.slab_counts = has_slabs(of_rows) ? a.slab_counts : nullptr;
  gather.slab_rows = narrow(a.tokens);
  gather.pairs = (has_slabs(of_rows) ? of_rows.num_local_experts : of_rows.top_k) * a.tokens;
  gather.columns = of_rows.hidden_size;
  gather.top_k = narrow(of_rows.top_k);
  gather.num_experts = narrow(of_rows.num_experts);
  gather.num_local_experts = narrow(of_rows.num_local_experts);
  return check_call("rows by expert", launch_gather_rows(gather, stream));
}

}  // namespace moesaic::cuda
