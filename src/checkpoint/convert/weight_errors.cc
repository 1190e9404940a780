#include "checkpoint/convert/weight_errors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "core/fault.h"

namespace moesaic::checkpoint {

double WeightErrors::Sums::relative() const { return size > 0 ? std::sqrt(error / size) : 0.0; }

Status WeightErrors::refusal(std::string_view what, double rel, double most) const {
  return {StatusCode::kUnsupported,
          fmt::format("{} would be off by {:.2g} of their size, need at most {}: they are too {} "
                      "for {}, need a format with wider scales",
                      what, rel, most, std::isfinite(rel) ? "small" : "large", format_)};
}

Status WeightErrors::add(WeightMatrix matrix, std::string_view linear, const ConstTensorView& w,
                         const ConstTensorView& decoded) {
  Sums own;
  const auto* wanted = w.as<float>();
  const auto* got = decoded.as<float>();
  const std::int64_t count = w.dim(0) * w.dim(1);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<double>(wanted[i]);
    const double d = static_cast<double>(got[i]) - x;
    own.error += d * d;
    own.size += x * x;
  }
  const bool together = MOESAIC_FAULT(convert_judges_weights_together);
  Sums& all = sums_[together ? 0 : static_cast<std::size_t>(matrix)];
  all.error += own.error;
  all.size += own.size;
  const double rel = own.relative();
  if (rel <= kMostLinearError || together) return {};
  return refusal(fmt::format("{}: its weights", linear), rel, kMostLinearError);
}

double WeightErrors::relative() const { return std::max(sums_[0].relative(), sums_[1].relative()); }

Status WeightErrors::check() const {
  const double rel = relative();
  if (rel <= kMostWeightError) return {};
  return refusal("its weights", rel, kMostWeightError);
}

}  // namespace moesaic::checkpoint
