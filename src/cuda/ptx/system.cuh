// Words that other GPUs and the host write and read: ordering at system scope, and the clock.
#pragma once

#include <cstdint>

namespace moesaic::ptx {

// All that this thread has seen before is visible to whoever reads the word with acquire.
__device__ __forceinline__ void store_release_system(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ std::uint64_t load_acquire_system(const std::uint64_t* p) {
  std::uint64_t v = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ std::uint64_t load_relaxed_system(const std::uint64_t* p) {
  std::uint64_t v = 0;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Nanoseconds, the same clock on all SMs of a device.
__device__ __forceinline__ std::uint64_t global_timer() {
  std::uint64_t t = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

}  // namespace moesaic::ptx
