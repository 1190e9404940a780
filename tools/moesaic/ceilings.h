// The two ceilings that every benchmark and the demo quote floors against.
#pragma once

#include <algorithm>

#include "moesaic/status.h"

namespace moesaic::tool {

struct Ceilings {
  double read_gbps = 0;
  double gflops = 0;

  // The least time that they allow for so many bytes and operations.
  double floor_us(double bytes, double flops) const {
    return std::max(bytes / (read_gbps * 1e3), flops / (gflops * 1e3));
  }
};

// Which multiply-add a stage is made of: fp32 (gate, router, schemes f32 and f16), what the CPU tier
// has for activations that are exact in bf16, or int8 (the same where the tier has no such product).
enum class Arithmetic { kF32, kNarrow, kInt8 };

// Of the CPU tier in force. Measured once per process, thread count and arithmetic. The errors of
// cpu::current_kernels and cpu::measure_ceilings.
Result<Ceilings> measure_ceilings(int threads, Arithmetic arithmetic);

}  // namespace moesaic::tool
