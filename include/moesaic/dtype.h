// Element types. Meaning of the bits: docs/concepts.md; codecs: src/numerics. Names are the
// safetensors names.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "moesaic/kinds.h"

namespace moesaic {

// Bits per element: 4, 6, 8, 16, 32 or 64; 0 for a value outside the enumeration.
int dtype_bits(DType dtype);
// The exact, case-sensitive safetensors name: "BF16", "F8_E4M3", ...; "I4" and "U4"; "unknown" for a
// value outside the enumeration.
std::string_view dtype_name(DType dtype);
// Inverse of dtype_name for the types that files have; empty for any other name (never a lenient
// guess).
std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace moesaic
