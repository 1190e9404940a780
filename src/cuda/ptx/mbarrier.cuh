// Barriers in shared memory (mbarrier) and named barriers. Addresses are 32-bit shared addresses.
#pragma once

#include <cstdint>

namespace moesaic::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mbarrier_init(std::uint32_t bar, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives on the barrier at the same offset in another CTA of the cluster. Default semantics: a
// release at cluster scope would cost a memory barrier of the whole GPU (measured: a third of the
// kernel), and only reads of shared memory by finished wgmmas need ordering here.
__device__ __forceinline__ void mbarrier_arrive_remote(std::uint32_t bar, std::uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(bar),
      "r"(cta)
      : "memory");
}
// Writes a word at the same offset in another CTA of the cluster; its four bytes complete on the
// barrier at offset `bar` there.
__device__ __forceinline__ void store_remote_async(std::uint32_t dst, std::uint32_t value,
                                                   std::uint32_t bar, std::uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 at, on;\nmapa.shared::cluster.u32 at, %0, %3;\n"
      "mapa.shared::cluster.u32 on, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [at], %1, [on];\n}\n" ::"r"(
          dst),
      "r"(value), "r"(bar), "r"(cta)
      : "memory");
}
// One arrival that also announces `bytes` of copies still to complete on the barrier.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// Whether the phase of the given parity has completed; does not wait.
__device__ __forceinline__ bool mbarrier_test(std::uint32_t bar, std::uint32_t parity) {
  std::uint32_t done = 0;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t bar, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
// Barrier `id` (1..15) among `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The halves of it; a relaxed arrival orders nothing and only says that the CTA runs.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// 16 bytes to the same shared address in another CTA of the cluster. Every lane's store is a packet
// of its own there, so narrower ones cost as much.
__device__ __forceinline__ void store_remote(std::uint32_t address, std::uint32_t cta,
                                             const float (&v)[4]) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}\n" ::"r"(address),
      "r"(cta), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}
// 16 bytes from there.
__device__ __forceinline__ void load_remote(std::uint32_t address, std::uint32_t cta,
                                            float (&v)[4]) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
      : "r"(address), "r"(cta)
      : "memory");
}
__device__ __forceinline__ std::uint32_t cluster_cta_rank() {
  std::uint32_t rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace moesaic::ptx
