// Warpgroup matrix multiply on sm_90a: operand descriptors, ordering, and the generated shapes.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma_shapes.cuh"

namespace moesaic::ptx {

// Descriptor of a K-major tile with rows of 128 bytes in the 128-byte swizzle: rows 8 apart are
// 1024 bytes apart. The tile starts at a multiple of 1024 bytes; a K step of 32 bytes inside the
// swizzle atom adds 2 to the descriptor.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t shared_address) {
  constexpr std::uint64_t kSwizzle128 = 1ULL << 62;
  constexpr std::uint64_t kRowGroupStride = (1024ULL >> 4) << 32;
  return kSwizzle128 | kRowGroupStride | (1ULL << 16) |
         static_cast<std::uint64_t>((shared_address & 0x3FFFFU) >> 4);
}
inline constexpr std::uint64_t kWgmmaStep = 2;  // 32 bytes of K

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
