// What this machine can do at best, measured in this process: benchmarks state their times relative
// to it.
#pragma once

#include "cpu/kernels.h"
#include "moesaic/status.h"

namespace moesaic::cpu {

struct Ceilings {
  // 10^9 bytes per second, all threads reading distinct memory well beyond the caches.
  double read_gbps = 0;
  double gflops = 0;  // 10^9 operations per second of the tier's multiply-add, registers only
};

// Takes the best of several passes: of about 10 ms over 512 MiB, of 1 or 2 ms of multiply-adds;
// under a second in all. The multiply-add is the one that GEMMs with this operand use on this tier;
// kI8 only where the tier has store_i8.
Result<Ceilings> measure_ceilings(const CpuKernels& kernels, OperandKind operand, int num_threads);

}  // namespace moesaic::cpu
