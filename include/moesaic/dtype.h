// Element types. Meaning of the bits: docs/concepts.md; codecs: src/numerics. Names are the
// safetensors names.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace moesaic {

enum class DType : std::uint8_t {
  kBool,
  kF4E2M1,  // two per byte, low nibble first
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,  // OCP
  kF8E4M3,  // OCP e4m3fn: no infinity, NaN = 0x7F and 0xFF
  kF8E8M0,  // power-of-two scale, NaN = 0xFF
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
  // In memory only, no file has them: two per byte, low nibble first.
  kI4,  // two's complement, -8..7
  kU4,  // 0..15, or the index of a table
};

// Bits per element: 4, 6, 8, 16, 32 or 64; 0 for a value outside the enumeration.
int dtype_bits(DType dtype);
// The exact, case-sensitive safetensors name: "BF16", "F8_E4M3", ...; "I4" and "U4"; "unknown" for a
// value outside the enumeration.
std::string_view dtype_name(DType dtype);
// Inverse of dtype_name for the types that files have; empty for any other name (never a lenient
// guess).
std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace moesaic
