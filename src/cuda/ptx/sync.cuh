// Grid-level ordering, programmatic dependent launch, register reallocation and small arithmetic
// that CUDA C++ has no name for.
#pragma once

#include <cstdint>

namespace moesaic::ptx {

// Waits for the kernels this launch depends on (and their writes). Without a programmatic launch
// attribute both are no-ops.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <int Registers>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
// Stays where it stands: the compiler does not move it between the wgmmas around it.
__device__ __forceinline__ float load_shared_f32(std::uint32_t address) {
  float v = 0;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t v = 0;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* p) {
  std::uint32_t v = 0;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release(std::uint32_t* p, std::uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ std::uint32_t add_acq_rel(std::uint32_t* p, std::uint32_t v) {
  std::uint32_t old = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float y = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y = 0;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The smaller and the larger; NaN if one is.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y = 0;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float y = 0;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// Two e4m3 codes, round to nearest even, saturating: `lo` in bits 0-7. NaN becomes 0x7F.
__device__ __forceinline__ std::uint32_t e4m3x2(float lo, float hi) {
  std::uint16_t r = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
// Two F16 or bf16, round to nearest even: `lo` in bits 0-15.
__device__ __forceinline__ std::uint32_t f16x2(float lo, float hi) {
  std::uint32_t r = 0;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ std::uint32_t bf16x2(float lo, float hi) {
  std::uint32_t r = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

}  // namespace moesaic::ptx
