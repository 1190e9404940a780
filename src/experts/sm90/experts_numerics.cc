// What rounding did to the rows of a call, read back from the codes and scales that it left in the
// workspace: for traces, which wait anyway. Kernels do nothing for it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "cuda/group_values.h"
#include "experts/problem_checks.h"
#include "experts/row_error.h"
#include "experts/sm90/experts_impl.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "quant/block_scales.h"
#include "quant/fp8_group.h"

namespace moesaic::cuda {
namespace {

// A quantised value stands for a step of its format, within which the lost part is uniform.
double rounding_variance(double step) { return step * step / 12.0; }

// The step around a finite value with `mantissa` explicit bits and this smallest normal number.
double step_at(double value, int mantissa, double normal) {
  if (std::abs(value) <= normal) return std::ldexp(normal, -mantissa);
  return std::ldexp(1.0, std::ilogb(value) - mantissa);
}

// Of values in NVFP4 groups, without the static scale: an e2m1 code times an e4m3 scale.
constexpr double kNv4Largest = 6.0 * 448.0;

// How far e2m1 codes may lie from what they were made of.
constexpr double kCodeTolerance = 0.2;
using Clamped = experts::ClampedValues;

// One group of e4m3 codes; the values that they were made of are gone.
experts::RowError of_codes(const Clamped& clamped, const std::uint8_t* codes, std::int64_t n,
                           float scale, float smallest_scale) {
  experts::RowError sums;
  sums.columns = n;
  sums.finite = std::isfinite(scale);
  if (!sums.finite) return sums;
  double amax = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto code = static_cast<double>(f32_from_e4m3(codes[i]));
    if (std::isnan(code)) {
      sums.finite = false;
      return sums;
    }
    const double value = code * static_cast<double>(scale);
    sums.size += value * value;
    sums.clamped += clamped.contains(value) ? 1 : 0;
    sums.error += rounding_variance(step_at(code, 3, 0x1p-6)) * static_cast<double>(scale) *
                  static_cast<double>(scale);
    amax = std::max(amax, std::abs(code));
  }
  if (amax == 0) sums.error = 0;  // all codes are zero: taken as exact
  if (scale <= smallest_scale && amax < 0x1p-6) sums.lost = sums.error;
  return sums;
}

// What a value at the end of a static scale's range may be off by: how far beyond it lay is gone with it.
// As much as is left of it, which is what clipping costs where it costs something (relu2 of normal sums:
// 0.36 of an output, estimated 0.06 without).
double clipped(double value) {
  return MOESAIC_FAULT(cuda_numerics_clip_for_nothing) ? 0.0 : value * value;
}

// Codes of a row with a static scale.
experts::RowError of_static_codes(const Clamped& clamped, const std::uint8_t* codes, std::int64_t n,
                                  float scale) {
  experts::RowError sums = of_codes(clamped, codes, n, scale, 0.0F);
  for (std::int64_t i = 0; i < n; ++i) {
    if ((codes[i] & 0x7F) != 0x7E) continue;
    sums.saturated = true;
    sums.error += clipped(448.0 * static_cast<double>(scale));
  }
  return sums;
}

// The values of a quantised row's codes; what they were rounded from is gone. A group's scale is
// that of its largest value.
experts::RowError of_values(const Clamped& clamped, RowForm form, const std::uint16_t* row,
                            std::int64_t n, float input) {
  const bool e4m3 = form == RowForm::kMx8Values || form == RowForm::kFp8Values;
  const std::int64_t columns = row_group_columns(form);
  experts::RowError sums;
  sums.columns = n;
  for (std::int64_t begin = 0; begin < n; begin += columns) {
    const std::int64_t end = std::min(begin + columns, n);
    float amax = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const float value = f32_from_bf16(row[i]);
      sums.finite = sums.finite && std::isfinite(value);
      amax = std::max(amax, std::abs(value));
    }
    // Values of NVFP4 are without the input scale, and so is the rule with a multiplier of 1.
    const auto scale = static_cast<double>(group_scale(form, amax, 1.0F).scale);
    if (scale == 0.0) continue;
    for (std::int64_t i = begin; i < end; ++i) {
      const double value = static_cast<double>(f32_from_bf16(row[i]));
      const double step = step_at(value / scale, e4m3 ? 3 : 1, e4m3 ? 0x1p-6 : 1.0) * scale;
      const double unit = static_cast<double>(input);
      sums.size += value * value * unit * unit;
      sums.clamped += clamped.contains(value * unit) ? 1 : 0;
      sums.error += rounding_variance(step) * unit * unit;
      if (form != RowForm::kNv4Values || std::abs(value) < kNv4Largest) continue;
      sums.saturated = true;
      sums.error += clipped(value * unit);
    }
  }
  return sums;
}

// Values that were rounded to bf16 or F16.
experts::RowError of_rounded(const Clamped& clamped, DType dtype, const std::byte* row,
                             std::int64_t n) {
  const bool f16 = dtype == DType::kF16;
  experts::RowError sums;
  sums.columns = n;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<double>(load_as_f32(row, dtype, i));
    if (!std::isfinite(value)) {
      sums.finite = false;
      return sums;
    }
    sums.size += value * value;
    sums.clamped += clamped.contains(value) ? 1 : 0;
    if (value == 0) continue;
    sums.error += rounding_variance(step_at(value, f16 ? 10 : 7, f16 ? 0x1p-14 : 0x1p-126));
  }
  return sums;
}

template <class T>
Result<std::vector<T>> read_back(const char* what, const T* from, std::int64_t count) {
  std::vector<T> to(static_cast<std::size_t>(count));
  if (count == 0) return to;
  MOESAIC_RETURN_IF_ERROR(
      copy_to_host(what, to.data(), from, count * static_cast<std::int64_t>(sizeof(T))));
  return to;
}

// Rows [pairs] of the pairs that have an expert here (row >= 0): no kernel wrote the others, which stay
// zero.
Result<std::vector<std::byte>> read_live_rows(const char* what, const std::byte* from,
                                              std::span<const std::int32_t> row,
                                              std::int64_t row_bytes) {
  const auto pairs = static_cast<std::int64_t>(row.size());
  std::vector<std::byte> to(static_cast<std::size_t>(pairs * row_bytes));
  const auto live = [&](std::int64_t p) {
    return p < pairs && row[static_cast<std::size_t>(p)] >= 0;
  };
  for (std::int64_t first = 0; first < pairs; ++first) {
    if (!live(first)) continue;
    std::int64_t end = first;
    while (live(end)) ++end;
    MOESAIC_RETURN_IF_ERROR(copy_to_host(what, to.data() + first * row_bytes,
                                         from + first * row_bytes, (end - first) * row_bytes));
    first = end;
  }
  return to;
}

}  // namespace

Status CudaExperts::add_numerics(const CudaExpertsArgs& a, std::span<RowNumerics> rows) const {
  const ExpertsPlan& plan = impl_->plan;
  MoeProblem problem = impl_->problem;
  if (has_slabs(problem)) return unsupported("numerics: got the batched format, need standard");
  if (a.pair_capacity > 0) return unsupported("numerics: got a pair_capacity, need 0");
  if (a.top_k > 0) problem.top_k = a.top_k;
  const DeviceScope scope(impl_->device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  Arena arena({static_cast<std::byte*>(a.workspace), static_cast<std::size_t>(a.workspace_bytes)});
  const ExpertsWorkspace w = ExpertsWorkspace::carve(problem, plan, a.tokens, 0, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  const std::int64_t hidden = problem.hidden_size, inner = problem.intermediate_size;
  const std::int64_t pairs = a.tokens * problem.top_k, row_bytes = plan.w2.row_bytes();
  const bool quantized = plan.quantizes();

  const DType x_dtype = a.rows.dtype, y_dtype = plan.wide() ? DType::kF32 : DType::kBF16;
  const std::int64_t x_bytes = hidden * dtype_bits(x_dtype) / 8;
  MOESAIC_ASSIGN_OR_RETURN(
      const auto x,
      read_back("hidden_states", static_cast<const std::byte*>(a.rows.data), a.tokens * x_bytes));
  MOESAIC_ASSIGN_OR_RETURN(const auto row_of_pair, read_back("row_of_pair", w.row_of_pair, pairs));
  // Rows lie without gaps, in the order of experts.
  std::int64_t inner_rows = 0;
  for (const std::int32_t r : row_of_pair) inner_rows = std::max<std::int64_t>(inner_rows, r + 1);
  MOESAIC_ASSIGN_OR_RETURN(const auto codes, read_back("inner", w.inner, inner_rows * row_bytes));
  const bool groups = plan.format->rows == RowForm::kFp8Group128;
  std::vector<float> scales;  // [groups][inner_rows]
  for (std::int64_t k = 0; groups && k < inner; k += quant::kFp8BlockSize) {
    const float* const group = w.inner_scale + k / quant::kFp8BlockSize * w.inner_scale_stride;
    MOESAIC_ASSIGN_OR_RETURN(const auto some, read_back("inner_scale", group, inner_rows));
    scales.insert(scales.end(), some.begin(), some.end());
  }
  std::vector<std::uint16_t> whole_rows;
  if (plan.quantizes_late()) {
    MOESAIC_ASSIGN_OR_RETURN(
        whole_rows, read_back("inner_bf16", reinterpret_cast<const std::uint16_t*>(w.inner_bf16),
                              inner_rows * inner));
  }
  // Static scales of both projections, and whose a pair has.
  const std::int64_t local = problem.num_local_experts;
  std::vector<float> x_scales, inner_scales;
  std::vector<std::int32_t> ids, map;
  if (plan.static_scales) {
    MOESAIC_ASSIGN_OR_RETURN(x_scales, read_back("w13_input_scale", impl_->x_static(a, w), local));
    MOESAIC_ASSIGN_OR_RETURN(inner_scales,
                             read_back("w2_input_scale", impl_->inner_static(a, w), local));
    MOESAIC_ASSIGN_OR_RETURN(ids, read_back("topk_ids", a.topk_ids, pairs));
    if (a.expert_map != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(map, read_back("expert_map", a.expert_map, problem.num_experts));
    }
  }
  const auto expert_of = [&](std::int64_t pair) {
    const auto id = static_cast<std::size_t>(ids[static_cast<std::size_t>(pair)]);
    return map.empty() ? id : static_cast<std::size_t>(map[id]);
  };
  const bool slots = a.result.kind == CudaResult::Kind::kSlots;
  const std::int64_t y_bytes = hidden * dtype_bits(y_dtype) / 8;
  const std::byte* const y = slots ? static_cast<const std::byte*>(a.result.data) : w.y2;
  MOESAIC_ASSIGN_OR_RETURN(const auto y2, read_live_rows("y2", y, row_of_pair, y_bytes));
  std::vector<float> weights;
  if (plan.weight_on_input) {
    MOESAIC_ASSIGN_OR_RETURN(weights, read_back("topk_weights", a.topk_weights, pairs));
  }

  const experts::NoiseModel model(problem);
  const DType rounded = plan.half_rows() ? DType::kF16 : DType::kBF16;
  experts::RowErrorMeter meter(problem, rounded);
  const experts::ClampedValues clamped(problem.activation, kCodeTolerance);
  const float smallest_scale =
      quant::fp8_group_scale(0.0F, plan.power_of_two_scales ? quant::ScaleRounding::kCeilPowerOfTwo
                                                            : quant::ScaleRounding::kNone);
  std::vector<float> row(static_cast<std::size_t>(std::max(hidden, inner)));
  for (std::int64_t p = 0; p < pairs; ++p) {
    const std::int64_t t = p / problem.top_k;
    const std::int64_t r = row_of_pair[static_cast<std::size_t>(p)];
    if (r < 0) continue;
    for (std::int64_t i = 0; i < hidden; ++i) {
      const float v = load_as_f32(x.data() + t * x_bytes, x_dtype, i);
      row[static_cast<std::size_t>(i)] =
          weights.empty() ? v : v * weights[static_cast<std::size_t>(p)];
    }
    const float x_scale = plan.static_scales ? x_scales[expert_of(p)] : 1.0F;
    const experts::RowError input = meter.measure(row.data(), hidden, x_scale);
    experts::RowError of_inner;
    const std::byte* from = codes.data() + r * row_bytes;
    if (!quantized) of_inner = of_rounded(clamped, rounded, from, inner);
    if (plan.quantizes_late()) {
      for (std::int64_t i = 0; i < inner; ++i) {
        row[static_cast<std::size_t>(i)] =
            f32_from_bf16(whole_rows[static_cast<std::size_t>(r * inner + i)]);
      }
      of_inner = meter.measure(row.data(), inner, 1.0F);
    } else if (row_has_values(plan.format->rows)) {
      of_inner = of_values(clamped, plan.format->rows, reinterpret_cast<const std::uint16_t*>(from),
                           inner, plan.static_scales ? inner_scales[expert_of(p)] : 1.0F);
    } else if (plan.static_scales) {
      of_inner = of_static_codes(clamped, reinterpret_cast<const std::uint8_t*>(from), inner,
                                 inner_scales[expert_of(p)]);
    }
    for (std::int64_t k = 0; groups && k < inner; k += quant::kFp8BlockSize) {
      const auto at = static_cast<std::size_t>(k / quant::kFp8BlockSize * inner_rows + r);
      of_inner.add(of_codes(clamped, reinterpret_cast<const std::uint8_t*>(from + k),
                            std::min(quant::kFp8BlockSize, inner - k), scales[at], smallest_scale));
    }
    for (std::int64_t i = 0; i < hidden; ++i) {
      row[static_cast<std::size_t>(i)] = load_as_f32(y2.data() + p * y_bytes, y_dtype, i);
    }
    rows[static_cast<std::size_t>(t)].add(model.of(input, of_inner, row.data(), hidden, 1.0F));
  }
  return {};
}

}  // namespace moesaic::cuda
