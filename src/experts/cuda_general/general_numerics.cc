// What rounding did to the rows of a call of the general experts, from what it left in its
// workspace: for traces, which wait anyway.
#include <cmath>
#include <vector>

#include "core/refusal.h"
#include "experts/cuda_general/general_experts_impl.h"
#include "experts/row_error.h"
#include "experts/sm90/experts_plan.h"
#include "numerics/element.h"

namespace moesaic::cuda {
namespace {

template <class T>
Result<std::vector<T>> general_read_back(const char* what, const void* from, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  MOESAIC_RETURN_IF_ERROR(
      copy_to_host(what, to.data(), from, count * static_cast<std::int64_t>(sizeof(T))));
  return to;
}

// Values that have been rounded to `dtype`: each stands for a step of it, in which what was lost is
// uniform.
double variance_of_rounding(const float* row, std::int64_t n, DType dtype) {
  if (dtype == DType::kF32) return 0;
  const int mantissa = dtype == DType::kBF16 ? 7 : 10;
  const double normal = dtype == DType::kBF16 ? 0x1p-126 : 0x1p-14;
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double v = std::abs(static_cast<double>(row[i]));
    if (v == 0 || !std::isfinite(v)) continue;
    const double step = std::ldexp(1.0, std::ilogb(v < normal ? normal : v) - mantissa);
    sum += step * step / 12.0;
  }
  return sum;
}

}  // namespace

Status GeneralExperts::add_numerics(const CudaExpertsArgs& a, std::span<RowNumerics> rows) const {
  const MoeProblem problem = of_call(a);
  if (has_slabs(problem)) return unsupported("numerics: got the batched format, need standard");
  const DeviceScope scope(device_);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const GeneralWorkspace w = GeneralWorkspace::carve(problem, plan_, a.tokens, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const std::int64_t hidden = plan_.hidden, inner = plan_.inner;
  const bool slots = a.result.kind == CudaResult::Kind::kSlots;
  const DType y_dtype = slots ? a.result.dtype : DType::kF32;
  const auto bytes = [](DType dtype, std::int64_t count) {
    return count * (dtype_bits(dtype) / 8);
  };
  MOESAIC_ASSIGN_OR_RETURN(const auto x,
                           general_read_back<std::byte>("hidden_states", a.rows.data,
                                                        bytes(a.rows.dtype, a.tokens * hidden)));
  MOESAIC_ASSIGN_OR_RETURN(const auto row_of_pair,
                           general_read_back<std::int32_t>("row_of_pair", w.row_of_pair, w.pairs));
  MOESAIC_ASSIGN_OR_RETURN(
      const auto middle,
      general_read_back<std::byte>("inner", w.inner, bytes(plan_.operand, w.pairs * inner)));
  MOESAIC_ASSIGN_OR_RETURN(const auto y,
                           general_read_back<std::byte>("y", slots ? a.result.data : w.y,
                                                        bytes(y_dtype, w.pairs * hidden)));
  std::vector<float> weights;
  if (problem.apply_router_weight_on_input) {
    MOESAIC_ASSIGN_OR_RETURN(weights,
                             general_read_back<float>("topk_weights", a.topk_weights, w.pairs));
  }

  // Stored scales of both projections, and whose a pair has.
  const std::int64_t local = problem.num_local_experts;
  std::vector<float> x_scales, inner_scales;
  std::vector<std::int32_t> ids, map;
  if (const float* const of_x = static_scales(a, w, /*of_w2=*/false); of_x != nullptr) {
    MOESAIC_ASSIGN_OR_RETURN(x_scales, general_read_back<float>("w13_input_scale", of_x, local));
    MOESAIC_ASSIGN_OR_RETURN(
        inner_scales,
        general_read_back<float>("w2_input_scale", static_scales(a, w, /*of_w2=*/true), local));
    MOESAIC_ASSIGN_OR_RETURN(ids, general_read_back<std::int32_t>("topk_ids", a.topk_ids, w.pairs));
    if (a.expert_map != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(
          map, general_read_back<std::int32_t>("expert_map", a.expert_map, problem.num_experts));
    }
  }
  const auto scale_of = [&](const std::vector<float>& scales, std::int64_t pair) {
    if (scales.empty()) return 1.0F;
    const auto id = static_cast<std::size_t>(ids[static_cast<std::size_t>(pair)]);
    return scales[map.empty() ? id : static_cast<std::size_t>(map[id])];
  };
  const experts::NoiseModel model(problem);
  experts::RowErrorMeter meter(problem, plan_.operand);
  std::vector<float> row(static_cast<std::size_t>(hidden > inner ? hidden : inner));
  const auto load = [&](const std::vector<std::byte>& from, DType dtype, std::int64_t first,
                        std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      row[static_cast<std::size_t>(i)] = load_as_f32(from.data(), dtype, first + i);
    }
  };
  for (std::int64_t p = 0; p < w.pairs; ++p) {
    const std::int64_t t = p / problem.top_k;
    const std::int64_t place = row_of_pair[static_cast<std::size_t>(p)];
    if (place < 0) continue;
    load(x, a.rows.dtype, t * hidden, hidden);
    if (!weights.empty()) {
      for (std::int64_t i = 0; i < hidden; ++i) {
        row[static_cast<std::size_t>(i)] *= weights[static_cast<std::size_t>(p)];
      }
    }
    const experts::RowError of_input = meter.measure(row.data(), hidden, scale_of(x_scales, p));
    load(middle, plan_.operand, place * inner, inner);
    experts::RowError of_inner = meter.measure(row.data(), inner, scale_of(inner_scales, p));
    of_inner.error += variance_of_rounding(row.data(), inner, plan_.operand);
    load(y, y_dtype, p * hidden, hidden);
    rows[static_cast<std::size_t>(t)].add(model.of(of_input, of_inner, row.data(), hidden, 1.0F));
  }
  return {};
}

}  // namespace moesaic::cuda
