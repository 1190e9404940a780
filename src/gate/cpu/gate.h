// How long the CPU's gate takes. Its kernel is gate_logits of the tier that is in force
// (cpu/kernels.h).
#pragma once

#include <cstdint>

namespace moesaic::gate {

// What one thread needs for [rows, experts] logits: 13 multiply-adds a nanosecond (2^18 in 20 us),
// for the size of its team (cpu/team.h).
constexpr double cpu_gate_us(std::int64_t rows, std::int64_t experts, std::int64_t hidden_size) {
  return static_cast<double>(rows) * static_cast<double>(experts) *
         static_cast<double>(hidden_size) / 13e3;
}

}  // namespace moesaic::gate
