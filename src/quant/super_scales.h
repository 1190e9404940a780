// Scales of a super-block (OperandQuant::super_bits) as integers and the number that they are multiples of.
#pragma once

#include <cstdint>
#include <span>

namespace moesaic::quant {

// values as integers (codes) of `bits` bits times the number with the F16 code `unit`, exactly; -0 is 0.
// At most kSuperBlockColumns / 16 values. False: they are no such numbers; then codes and unit say
// nothing.
bool split_super_scales(std::span<const float> values, int bits, std::int8_t* codes,
                        std::uint16_t* unit);

}  // namespace moesaic::quant
