// The two ceilings that every benchmark and the demo quote floors against.
#pragma once

namespace moesaic::tool {

struct Ceilings {
  double read_gbps = 0;
  double gflops = 0;
};

// Of the CPU tier in force, with the multiply-add that bf16 and fp8 layers use. Measured once per
// process and thread count; zeros when no tier can run.
Ceilings measure_ceilings(int threads);
// The same with the fp32 multiply-add, which is what the f32 and f16 schemes use.
Ceilings measure_ceilings_f32(int threads);

}  // namespace moesaic::tool
