// Copies from global to shared memory: contiguous bulk copies that complete on an mbarrier, and
// 16- or 4-byte gathers. Also L2 policies, and the fence between generic and asynchronous accesses.
#pragma once

#include <cstdint>

namespace moesaic::ptx {

__device__ __forceinline__ std::uint64_t l2_evict_first_policy() {
  std::uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t l2_evict_normal_policy() {
  std::uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// bytes: a multiple of 16; both addresses 16-byte aligned.
__device__ __forceinline__ void bulk_load(std::uint32_t dst, const void* src, std::uint32_t bytes,
                                          std::uint32_t bar, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
// Brings `bytes`, a multiple of 16, into L2.
__device__ __forceinline__ void bulk_prefetch(const void* src, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
// The same into every CTA of the cluster whose bit is set in `ctas`, at the same shared address and
// completing on each one's own barrier.
__device__ __forceinline__ void bulk_load_multicast(std::uint32_t dst, const void* src,
                                                    std::uint32_t bytes, std::uint32_t bar,
                                                    std::uint16_t ctas, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1], %2, [%3], %4, %5;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "h"(ctas), "l"(policy)
      : "memory");
}
// base + 16 * units. Volatile: hoisting a table of such addresses out of a loop costs more
// registers than the one instruction it saves.
__device__ __forceinline__ const void* offset_16(const void* base, std::uint32_t units) {
  std::uint64_t address = 0;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(units), "l"(base));
  return reinterpret_cast<const void*>(address);
}
// 16 bytes, or zeros where valid is false (src must be an address that may be formed).
__device__ __forceinline__ void async_load_16(std::uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same for rows that are read whole: L2 fetches the 128-byte line.
__device__ __forceinline__ void async_load_16_line(std::uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
// Brings the line of an address into L1; nothing where it is one of shared memory.
__device__ __forceinline__ void prefetch_l1(const void* address) {
  asm volatile("prefetch.L1 [%0];" ::"l"(address) : "memory");
}
// The thread's copies so far become a group; waits until at most `Pending` groups are under way.
__device__ __forceinline__ void async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
__device__ __forceinline__ void async_load_4(std::uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src),
               "r"(valid ? 4 : 0)
               : "memory");
}
// This thread's gathers so far arrive on `bar` once they have landed, as one of the arrivals that
// the barrier expects. Who waits there passes fence_proxy_async before wgmma reads them.
__device__ __forceinline__ void async_arrive(std::uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Before the end of a thread whose gathers no barrier has waited for.
__device__ __forceinline__ void async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Shared memory written by this thread's ordinary or gathered stores becomes readable by wgmma and
// the bulk copy engine, once a barrier has passed it on.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace moesaic::ptx
