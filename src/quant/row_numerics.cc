#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/fault.h"
#include "moesaic/numerics.h"

namespace moesaic {
namespace {

// Intermediate size for which the bounds of quant/scheme.cc are stated.
constexpr double kStatedSize = 512.0;
// Growth of int8's bound with each factor e of the intermediate size: |silu(g) u| of normal g and u
// falls off like exp(-t), so the largest of I values, and with it the row's scale, grows with ln I.
// Fitted to 400 rows of each of 512 ... 32768 columns: the RMS error is 0.70 of the bound at all.
constexpr double kInt8Growth = 0.173;
// An estimate above its scheme's bound was made for rows unlike those that the gains of numerics.h
// were checked with.
constexpr double kEstimateMargin = 1.5;
// Within the bound the estimate of many rows is good to this: 1.15 at most in 88 random layers of 4-bit
// schemes, of all shapes, activations and routings.
constexpr double kSpread = 1.15;
// Single rows scatter around the estimate by up to this factor; that of this many is theirs.
constexpr double kScatter = 1.3;
constexpr std::int64_t kManyRows = 16;
// Of rows of different sizes: in 339 calls of more effective ones than this the error was at most 1.12
// times the estimate, in 1677 of fewer up to 1.7 times, in one of a hundred above 1.28.
constexpr double kManyEffectiveRows = 8;

}  // namespace

void RowNumerics::add(const RowNumerics& part, double factor) {
  flags |= part.flags;
  if (!std::isfinite(factor)) {
    flags |= kRowNotFinite;
    return;
  }
  size += factor * factor * part.size;
  noise += factor * factor * part.noise;
}

void NumericsSummary::add(const RowNumerics& row) {
  const auto count = [&](std::uint32_t flag) {
    return static_cast<std::int64_t>((row.flags & flag) != 0 ? 1 : 0);
  };
  ++rows;
  saturated += count(kRowSaturated);
  flushed += MOESAIC_FAULT(numerics_flushed_rows_not_counted) ? 0 : count(kRowFlushed);
  not_finite += count(kRowNotFinite);
  beyond_bound += count(kRowBeyondBound);
  outside += row.flags != 0 ? 1 : 0;
  size += row.size;
  noise += row.noise;
  squares += row.size * row.size;
}

void NumericsSummary::add(const NumericsSummary& other) {
  rows += other.rows;
  saturated += other.saturated;
  flushed += other.flushed;
  not_finite += other.not_finite;
  beyond_bound += other.beyond_bound;
  outside += other.outside;
  size += other.size;
  noise += other.noise;
  squares += other.squares;
}

double NumericsSummary::error_estimate() const {
  // Of rows that are not finite nothing was measured.
  const bool unknown = noise > 0 || not_finite > 0;
  if (!(size > 0)) return unknown ? std::numeric_limits<double>::infinity() : 0.0;
  return std::sqrt(noise / size);
}

double NumericsSummary::effective_rows() const {
  const auto all = static_cast<double>(rows);
  if (!(squares > 0) || MOESAIC_FAULT(numerics_all_rows_count_alike)) return all;
  return std::min(all, size * size / squares);
}

bool NumericsSummary::within(double activation_bound) const {
  return outside == 0 && error_estimate() <= activation_bound;
}

NumericsSummary summarize(std::span<const RowNumerics> rows) {
  NumericsSummary summary;
  for (const RowNumerics& row : rows) summary.add(row);
  return summary;
}

double activation_bound(const OperandQuant& a, std::int64_t intermediate_size) {
  for (const Scheme& scheme : quant_schemes()) {
    if (scheme.activation.dtype != a.dtype) continue;
    // E2M1 has two kinds of scales; in all other formats the element decides.
    if (a.dtype == DType::kF4E2M1 && scheme.activation.scale_format != a.scale_format) continue;
    // int8: one scale for the row grows with it, those of groups of at most 128 do not.
    if (a.dtype == DType::kI8 && scheme.activation.granularity != a.granularity) continue;
    if (a.dtype != DType::kI8 || a.granularity != ScaleGranularity::kToken)
      return scheme.output_bound;
    const double times = static_cast<double>(intermediate_size) / kStatedSize;
    return scheme.output_bound * (1.0 + kInt8Growth * std::log(std::max(times, 1.0)));
  }
  return kLargestUsefulBound;
}

double output_bound(const Scheme& scheme, std::int64_t intermediate_size) {
  const double stated = activation_bound(scheme.activation, 1);
  const double here = activation_bound(scheme.activation, intermediate_size);
  if (here <= stated) return scheme.output_bound;
  const double rest = scheme.output_bound * scheme.output_bound - stated * stated;
  return std::sqrt(std::max(rest, 0.0) + here * here);
}

double weight_on_input_bound(DType rows) {
  if (rows == DType::kF32 || MOESAIC_FAULT(numerics_rounded_router_weights_are_free)) return 0.0;
  // Gate and up move together: 2.3, as in the estimate. The weight and the products with it.
  return 2.3 * std::numbers::sqrt2 * (rows == DType::kF16 ? 0x1p-11 : 0x1p-8);
}

double with_output_rounding(double bound, DType output) {
  const bool f16 = output == DType::kF16;
  // Bounds of arithmetic with operands of the dtype contain it.
  if (output == DType::kF32 || bound >= (f16 ? 1e-3 : 6e-3)) return bound;
  return std::hypot(bound, f16 ? 0x1p-11 : 0x1p-8);
}

double computed_bound(double bound, double activation, const NumericsSummary& summary) {
  const double estimate = summary.error_estimate();
  if (summary.not_finite > 0) return std::numeric_limits<double>::infinity();
  const bool few = summary.rows > 0 &&
                   (summary.rows < kManyRows || summary.effective_rows() < kManyEffectiveRows) &&
                   !MOESAIC_FAULT(numerics_few_rows_are_many);
  if (MOESAIC_FAULT(numerics_bound_is_always_the_stated_one)) return bound;
  const double weights = std::max(bound * bound - activation * activation, 0.0);
  const auto with_margin = [&](double margin) {
    return std::sqrt(weights + std::pow(margin * estimate, 2));
  };
  if (estimate * (few ? kScatter : 1.0) <= activation) {
    return std::max(bound, with_margin(kSpread));
  }
  const double wider = with_margin(kEstimateMargin);
  return wider <= std::max(bound, kLargestUsefulBound) ? wider
                                                       : std::numeric_limits<double>::infinity();
}

}  // namespace moesaic
