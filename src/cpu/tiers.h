// Which instruction-set tiers this binary has, which of them this machine can run, and which one is
// in force.
#pragma once

#include <string_view>
#include <vector>

#include "cpu/kernels.h"
#include "moesaic/status.h"

namespace moesaic::cpu {

// Tables of the tier files; null where the build's architecture lacks the tier.
const CpuKernels* kernels_baseline();     // x86-64-v2, ARMv8-A, or the build's own target
const CpuKernels* kernels_avx2();         // AVX2 + FMA + F16C
const CpuKernels* kernels_avx2_pairs();   // integer kernels alone: AVX2 without AVX-VNNI
const CpuKernels* kernels_avx512();       // AVX-512 F, VL, DQ, BW
const CpuKernels* kernels_avx512_bf16();  // + BF16 dot product, VBMI
const CpuKernels* kernels_amx();          // + tile registers, AMX_BF16, AMX_INT8
const CpuKernels* kernels_neon();         // 64-bit ARM: NEON

struct TierInfo {
  std::string_view name;
  bool available = false;
  std::string_view reason;  // why not available; empty otherwise
  const CpuKernels* kernels = nullptr;
};
// All tiers, fastest first, "baseline" last. Pure after the first call.
const std::vector<TierInfo>& cpu_tiers();

// Tier "avx2" as a machine without AVX-VNNI has it, on any machine with AVX2 (for tests), else null.
const CpuKernels* avx2_with_byte_pairs();

// The fastest available tier, or the one named by the environment variable MOESAIC_CPU_TIER: what
// gate, experts and transport run on. An unknown or unavailable name is kNotFound / kUnsupported and
// lists what there is.
Result<const CpuKernels*> current_kernels();
// That tier, whatever the environment says.
Result<const CpuKernels*> kernels_by_name(std::string_view name);
// The same, but kUnsupported when MOESAIC_CPU_TIER names another one.
Result<const CpuKernels*> usable_kernels(std::string_view name);

// What every num_threads = 0 means: one thread per core this process may use (its affinity mask);
// `requested` when that is > 0.
int resolve_threads(int requested);

// Resets flush-to-zero, denormals-are-zero and the rounding mode to the IEEE defaults for its
// lifetime, on this thread: results must not depend on what the caller's framework set.
class ScopedIeeeMode {
 public:
  ScopedIeeeMode();
  ~ScopedIeeeMode();
  ScopedIeeeMode(const ScopedIeeeMode&) = delete;
  ScopedIeeeMode& operator=(const ScopedIeeeMode&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace moesaic::cpu
