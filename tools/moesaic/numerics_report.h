// What rounding did to the rows of a call, in words and as JSON: run, verify and accuracy say it
// alike.
#pragma once

#include <string>
#include <string_view>

#include "console.h"
#include "moesaic/numerics.h"

namespace moesaic::tool {

// rows, outside (and of which kind), error_estimate, bound (of the activations), within
Json numerics_json(const NumericsSummary& summary, double activation_bound);

// "saturated 3, flushed 1 of 256 rows; estimated error 4.1e-02, stated bound 3.0e-02"
std::string numerics_text(const NumericsSummary& summary, double activation_bound);

// Empty while the condition of the bound holds; else what does not hold.
std::string numerics_warning(const NumericsSummary& summary, double activation_bound);
// What to do about it.
inline constexpr std::string_view kNumericsNextStep =
    "--quant f32 (or a weight-only scheme) computes them without quantising activations; see "
    "docs/accuracy.md";

}  // namespace moesaic::tool
