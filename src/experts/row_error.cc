#include "experts/row_error.h"

#include <algorithm>
#include <cmath>

#include "core/fault.h"
#include "experts/reference/operand.h"
#include "numerics/float_codec.h"
#include "quant/code_values.h"

namespace moesaic::experts {
namespace {

// How gate and up carry the error of their input, along it and across (numerics.h). Along: both
// move alike, 1 for up and up to 1.28 for silu and gelu, whose steepest relative slope is at 1.3;
// across: independently. Not gated: relu^2 doubles it.
constexpr double kAlongGated = 2.3, kAcrossGated = 1.6, kPlain = 2.0;
// Where g and u are normal and r times their limits, a share s = 1/2 - O(1/r) of the columns has both
// clamped, and only the rest still moves: f^2 is (1.6 e)^2 / (1 - 2 s), measured for r up to 1000,
// until errors are as wide as the limits and f^2 ends at 1.9 e.
constexpr double kClampedMost = 1.9;
// A single row's estimate scatters around that of all rows; measured on normal data up to 1.3.
constexpr double kRowMargin = 1.5;

// The codes of a format, in units of their scale.
struct CodeRange {
  double saturates;  // beyond: further from the largest code than rounding goes
  double normal;     // smallest normal code; 0: codes are evenly spaced
};
CodeRange code_range(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
      return {464.0, 0x1p-6};
    case DType::kF4E2M1:
      return {7.0, 1.0};
    case DType::kI8:
      return {128.5, 0.0};
    default:
      return {HUGE_VAL, 0.0};
  }
}

float rounded(DType dtype, float v) {
  if (dtype == DType::kBF16) return f32_from_bf16(bf16_from_f32(v));
  if (dtype == DType::kF16) return f32_from_f16(f16_from_f32(v));
  return v;
}

}  // namespace

void RowError::add(const RowError& part) {
  size += part.size;
  sum += part.sum;
  columns += part.columns;
  clamped += part.clamped;
  error += part.error;
  along += part.along;
  lost += part.lost;
  saturated = saturated || part.saturated;
  finite = finite && part.finite;
}

ClampedValues::ClampedValues(const ActivationSpec& a, double tolerance) {
  const auto limit = static_cast<double>(a.limit), beta = static_cast<double>(a.beta);
  const auto sigmoid = [](double v) { return 1.0 / (1.0 + std::exp(-v)); };
  std::array<double, 2> values{0, 0};
  switch (a.kind) {
    case ActivationKind::kSilu:
      values[0] = limit * sigmoid(limit) * limit;
      break;
    case ActivationKind::kSwigluOai: {
      const double gate = limit * sigmoid(static_cast<double>(a.alpha) * limit);
      values = {std::abs(limit + beta) * gate, std::abs(beta - limit) * gate};
      break;
    }
    case ActivationKind::kSwigluStep:
      values[0] = limit * limit;
      break;
    case ActivationKind::kSitu:  // no hard limits: tanh above 0.9
      if (a.up_limit > 0.0F) values[0] = beta * static_cast<double>(a.up_limit);
      tolerance = std::max(tolerance, 0.2);
      break;
    default:
      break;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!(values[i] > 0) || !std::isfinite(values[i])) continue;
    low_[i] = values[i] * (1 - tolerance);
    high_[i] = values[i] * (1 + tolerance);
  }
}

RowError RowErrorMeter::measure(const float* x, std::int64_t n, float input_scale,
                                const float* exact) {
  RowError sums;
  if (n <= 0) return sums;
  if (exact == nullptr || MOESAIC_FAULT(numerics_earlier_rounding_not_seen)) exact = x;
  row_.resize(static_cast<std::size_t>(n));
  codes_.resize(static_cast<std::size_t>(n));
  scales_.resize(static_cast<std::size_t>(ref_max_scales(activation_, n)));
  for (std::int64_t i = 0; i < n; ++i) {
    row_[static_cast<std::size_t>(i)] = rounded(round_dtype_, x[i]);
    sums.finite =
        sums.finite && std::isfinite(x[i]) && std::isfinite(row_[static_cast<std::size_t>(i)]);
  }
  if (!sums.finite) return sums;
  const RefOperand q =
      ref_quantize_row(activation_, input_scale, row_.data(), n, scales_.data(), codes_.data());
  const bool quantised = q.scales != nullptr;
  const std::int64_t group = quantised && q.group > 0 ? q.group : n;
  CodeRange range = code_range(activation_.dtype);
  if (!quantised) range = {HUGE_VAL, round_dtype_ == DType::kF16 ? 0x1p-14 : 0.0};
  for (std::int64_t begin = 0, g = 0; begin < n; begin += group, ++g) {
    const std::int64_t end = std::min(begin + group, n);
    const double scale =
        quantised ? static_cast<double>(q.scales[g]) * static_cast<double>(q.outer) : 1.0;
    double error = 0, amax = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const double want = static_cast<double>(exact[i]);
      const double off = static_cast<double>(q.values[i]) * scale - want;
      sums.size += want * want;
      sums.sum += want;
      sums.clamped += clamped_.contains(want) ? 1 : 0;
      sums.along += off * want;
      error += off * off;
      amax = std::max(amax, std::abs(want));
    }
    sums.error += error;
    if (amax > 0 && amax < range.normal * scale) sums.lost += error;
    if (amax > 0 && scale == 0.0) sums.lost += error;
    sums.saturated = sums.saturated || (scale > 0.0 && amax > range.saturates * scale);
  }
  sums.columns = n;
  if (MOESAIC_FAULT(numerics_saturation_not_seen)) sums.saturated = false;
  return sums;
}

NoiseModel::NoiseModel(const MoeProblem& problem)
    : gated(is_gated(problem.activation.kind)),
      bound(activation_bound(problem.quant.activation, problem.intermediate_size)),
      gain(static_cast<double>(problem.hidden_size) /
           static_cast<double>(std::max<std::int64_t>(problem.intermediate_size, 1))) {
  const OperandQuant& weight = problem.quant.weight;
  if (weight.table == CodeTable::kNone || problem.quant.activation.dtype != DType::kBF16) return;
  const quant::CodeValues values = quant::code_values(weight),
                          used = quant::code_values_bf16(weight);
  double size = 0, error = 0, bias = 0;
  for (std::size_t c = 0; c < values.size(); ++c) {
    const double off = static_cast<double>(used[c]) - static_cast<double>(values[c]);
    size += static_cast<double>(values[c]) * static_cast<double>(values[c]);
    error += off * off;
    bias += off;
  }
  const auto count = static_cast<double>(values.size());
  table_error = std::sqrt(error / size);
  table_bias = bias / count / std::sqrt(size / count);
}

double NoiseModel::relative2(const RowError& input, const RowError& inner) const {
  const double along = input.size > 0 ? input.along / input.size : 0.0;
  const double across = std::max(input.relative2() - along * along, 0.0);
  const double to_inner =
      gated ? kAlongGated * kAlongGated * along * along + kAcrossGated * kAcrossGated * across
            : kPlain * kPlain * (along * along + across);
  return std::max(to_inner, of_clamped(std::sqrt(across), inner)) + of_table(input) +
         inner.relative2();
}

double NoiseModel::of_clamped(double across, const RowError& inner) const {
  if (inner.clamped == 0 || MOESAIC_FAULT(numerics_limits_not_seen)) return 0.0;
  const double share = static_cast<double>(inner.clamped) / static_cast<double>(inner.columns);
  const double open = std::max(1.0 - 2.0 * share, 0.0);
  const double most = kClampedMost * across;
  const double squared = kAcrossGated * kAcrossGated * across * across;
  return squared < most * open ? squared / open : most;
}

double NoiseModel::of_table(const RowError& input) const {
  if (table_error == 0 || input.size <= 0 || MOESAIC_FAULT(numerics_table_is_exact)) return 0.0;
  // Entries that are rounded one way add up over a row's mean; sums of weights do not.
  const double mean2 = input.sum * input.sum / input.size;  // columns * mean^2 / RMS^2
  const double gain2 = gated ? kAcrossGated * kAcrossGated : kPlain * kPlain;
  const double once = table_error * table_error;
  return gain2 * (once + table_bias * table_bias * mean2) + once;
}

RowNumerics NoiseModel::of(const RowError& input, const RowError& inner, const float* y,
                           std::int64_t n, float factor) const {
  RowNumerics row;
  for (std::int64_t i = 0; i < n; ++i) {
    const double v = static_cast<double>(y[i]) * static_cast<double>(factor);
    row.size += v * v;
  }
  if (input.saturated || inner.saturated) row.flags |= kRowSaturated;
  // Of such a row there is no error, and it leaves the other rows theirs.
  const bool finite = input.finite && inner.finite && std::isfinite(row.size);
  if (!finite && !MOESAIC_FAULT(numerics_weights_are_finite)) {
    row.flags |= kRowNotFinite;
    row.size = 0;
    return row;
  }
  const double f2 = relative2(input, inner);
  row.noise = row.size * f2;
  // Lost values matter when they are more of the row than its format's rounding leaves.
  const auto lost = [&](const RowError& e) { return e.lost > bound * bound * e.size; };
  if (lost(input) || lost(inner)) row.flags |= kRowFlushed;
  if (!(f2 <= kRowMargin * kRowMargin * bound * bound)) row.flags |= kRowBeyondBound;
  // A row that was mostly lost does not show the size that it had before rounding.
  if (inner.lost > 0.5 * inner.size) {
    row.noise += inner.size * gain * static_cast<double>(factor) * static_cast<double>(factor);
  }
  // Hidden states that were lost might have become a row as long as they.
  if (input.lost > 0.5 * input.size && !MOESAIC_FAULT(numerics_lost_rows_are_exact)) {
    row.noise += input.size * static_cast<double>(factor) * static_cast<double>(factor);
  }
  return row;
}

}  // namespace moesaic::experts
