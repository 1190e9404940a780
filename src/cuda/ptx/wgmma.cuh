// Warpgroup matrix multiply on sm_90a: operand descriptors, ordering, and the generated shapes.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma_shapes.cuh"
#include "cuda/ptx/wgmma_shapes_f16.cuh"

namespace moesaic::ptx {

// Descriptor of a K-major tile with rows of 128 bytes in the 128-byte swizzle: rows 8 apart are
// 1024 bytes apart. The tile starts at a multiple of 1024 bytes. The upper word is the same for all
// tiles; tiles and steps differ in the lower one, by plain 32-bit sums without carry: bytes / 16.
inline constexpr std::uint64_t kWgmmaStep = 2;  // 32 bytes of K inside the swizzle atom
__device__ __forceinline__ std::uint32_t wgmma_tile(std::uint32_t shared_address) {
  return 1U << 16 | (shared_address & 0x3FFFFU) >> 4;
}
__device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t tile) {
  constexpr std::uint32_t kSwizzle128 = 1U << 30;
  constexpr std::uint32_t kRowGroupStride = 1024U >> 4;
  std::uint64_t descriptor = 0;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(tile), "r"(kSwizzle128 | kRowGroupStride));
  return descriptor;
}
// The same as one number that the compiler does not take apart: descriptors of steps of K inside the
// tile, + k kWgmmaStep, are then sums in uniform registers.
__device__ __forceinline__ std::uint64_t wgmma_whole_descriptor(std::uint32_t tile) {
  std::uint64_t descriptor = wgmma_descriptor(tile);
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

// Orders ordinary register writes before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

}  // namespace moesaic::ptx
