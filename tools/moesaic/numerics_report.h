// What rounding did to the rows of a call, in words and as JSON: run, verify and accuracy say it
// alike.
#pragma once

#include <string>

#include "console.h"
#include "moesaic/numerics.h"

namespace moesaic::tool {

// rows, outside (and of which kind), error_estimate, bound (of the activations), within
Json numerics_json(const NumericsSummary& summary, double activation_bound);

// "saturated 3, flushed 1 of 256 rows; estimated error 4.1e-02, stated bound 3.0e-02"
std::string numerics_text(const NumericsSummary& summary, double activation_bound);

// Empty while the condition of the bound holds; else what does not hold and what to do.
std::string numerics_warning(const NumericsSummary& summary, double activation_bound);

}  // namespace moesaic::tool
