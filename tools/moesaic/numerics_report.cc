#include "numerics_report.h"

#include <fmt/format.h>

#include <array>
#include <utility>

namespace moesaic::tool {

Json numerics_json(const NumericsSummary& s, double activation_bound) {
  return {{"rows", s.rows},
          {"outside", s.outside},
          {"saturated", s.saturated},
          {"flushed", s.flushed},
          {"not_finite", s.not_finite},
          {"beyond_bound", s.beyond_bound},
          {"error_estimate", finite(s.error_estimate())},
          {"bound", finite(activation_bound)},
          {"within", s.within(activation_bound)}};
}

std::string numerics_text(const NumericsSummary& s, double activation_bound) {
  std::string kinds;
  for (const auto& [name, count] : std::array<std::pair<const char*, std::int64_t>, 4>{
           {{"saturated", s.saturated},
            {"flushed", s.flushed},
            {"not finite", s.not_finite},
            {"beyond the bound", s.beyond_bound}}}) {
    if (count > 0) kinds += fmt::format("{}{} {}", kinds.empty() ? "" : ", ", name, count);
  }
  return fmt::format("{} of {} rows; estimated error {:.1e}, stated bound {:.1e}",
                     kinds.empty() ? "outside 0" : kinds, s.rows, s.error_estimate(),
                     activation_bound);
}

std::string numerics_warning(const NumericsSummary& s, double activation_bound) {
  if (s.within(activation_bound)) return {};
  return fmt::format("these rows are outside what the scheme's bound is stated for: {}",
                     numerics_text(s, activation_bound));
}

}  // namespace moesaic::tool
