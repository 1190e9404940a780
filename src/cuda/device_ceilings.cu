// What this device can do at best: bytes read per second and multiply-adds per second.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/device_timer.h"
#include "cuda/ptx/wgmma.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kReadThreads = 512;
constexpr int kUnroll = 8;
constexpr int kReadBlocks = 4;  // per multiprocessor: 512 threads each fill it

// Every thread keeps eight 16-byte loads in flight; the sum keeps them from being dropped.
__global__ void __launch_bounds__(kReadThreads)
    read_all(const uint4* data, std::int64_t count, std::uint32_t* sink) {
  std::uint32_t sum = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kReadThreads;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kReadThreads + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x9E3779B9U) *sink = sum;
}

// Random bits that are small numbers: e4m3 and bf16 exponents around 2^0.
__global__ void fill_random(std::uint32_t* data, std::int64_t words) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += stride) {
    std::uint32_t h = static_cast<std::uint32_t>(i) * 0x9E3779B9U;
    h ^= h >> 15;
    h *= 0x85EBCA6BU;
    h ^= h >> 13;
    data[i] = h;
  }
}

constexpr int kProductThreads = 256;  // two warpgroups, each 64 x 256 x one swizzle atom
constexpr int kProducts = 512;        // of 4 K steps each, per warpgroup
constexpr int kBody = 4;              // of them in a row
constexpr int kTileBytes = 128 * 128 + 256 * 128;

template <class Operand, bool kFp8>
__global__ void __launch_bounds__(kProductThreads, 1) multiply(std::uint32_t* sink) {
  extern __shared__ char raw[];
  const std::uint32_t unaligned = static_cast<std::uint32_t>(__cvta_generic_to_shared(raw));
  const std::uint32_t base = (unaligned + 1023U) & ~1023U;
  auto* const words = reinterpret_cast<std::uint32_t*>(raw + (base - unaligned));
  for (int i = static_cast<int>(threadIdx.x); i < kTileBytes / 4; i += kProductThreads) {
    std::uint32_t h = (static_cast<std::uint32_t>(i) + blockIdx.x * 7919U) * 0x9E3779B9U;
    h ^= h >> 15;
    h *= 0x85EBCA6BU;
    h ^= h >> 13;
    // Signs and mantissas random, exponents near one: no NaN, no infinity, normal magnitudes.
    words[i] = kFp8 ? (h & 0x8F8F8F8FU) | 0x30303030U : (h & 0x807F807FU) | 0x3F003F00U;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const std::uint32_t group = threadIdx.x / 128;
  const std::uint32_t a = ptx::wgmma_tile(base + group * 64 * 128);
  const std::uint32_t b = ptx::wgmma_tile(base + 128 * 128);
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0;
  // Products in flight must not cross the loop's end, or the compiler serialises all of them; while
  // one warpgroup drains the other one multiplies.
  for (int n = 0; n < kProducts / kBody; ++n) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kBody; ++i) {
      const std::uint32_t step = static_cast<std::uint32_t>(i % 4) * ptx::kWgmmaStep;
      ptx::Wgmma<Operand, 256>::run(d, ptx::wgmma_descriptor(a + step),
                                    ptx::wgmma_descriptor(b + step), 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  if (sum == 1.2345F) *sink = 1;
}

// Median microseconds of the last third of the replays within half a second: by then clocks are
// what the power limit leaves, as in a long benchmark.
Result<double> median_us(int device, const std::function<Status(void*)>& enqueue) {
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceTimer> timer,
                           DeviceTimer::create(device, enqueue));
  MOESAIC_ASSIGN_OR_RETURN(std::vector<double> samples, timer->replay(15, 0.5));
  samples.erase(samples.begin(),
                samples.begin() + static_cast<std::ptrdiff_t>(samples.size() * 2 / 3));
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

template <class Operand, bool kFp8>
Status launch_products(int sms, std::uint32_t* sink, void* stream) {
  constexpr int kBytes = kTileBytes + 1024;
  MOESAIC_RETURN_IF_ERROR(check_call(
      "ceilings", cudaFuncSetAttribute(multiply<Operand, kFp8>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)));
  multiply<Operand, kFp8>
      <<<static_cast<unsigned>(sms), kProductThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(
          sink);
  return check_call("ceilings", cudaGetLastError());
}

}  // namespace

Result<DeviceCeilings> measure_device_ceilings(int device, bool fp8) {
  const DeviceScope scope(device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(const int sms, require_hopper(device));
  std::size_t free_bytes = 0, total_bytes = 0;
  MOESAIC_RETURN_IF_ERROR(check_call("ceilings", cudaMemGetInfo(&free_bytes, &total_bytes)));
  // Whole turns of read_all's loop, which reads no rest: every byte that counts is read.
  const std::int64_t turn =
      std::int64_t{sizeof(uint4)} * kUnroll * kReadThreads * kReadBlocks * sms;
  const std::int64_t bytes =
      std::min<std::int64_t>(std::int64_t{4} << 30, static_cast<std::int64_t>(free_bytes / 2)) /
      turn * turn;
  Allocation buffer, sink;
  MOESAIC_RETURN_IF_ERROR(buffer.reserve("ceilings", bytes));
  MOESAIC_RETURN_IF_ERROR(sink.reserve("ceilings", 4));
  fill_random<<<1024, 256>>>(buffer.as<std::uint32_t>(), bytes / 4);
  MOESAIC_RETURN_IF_ERROR(check_call("ceilings", cudaGetLastError()));
  MOESAIC_RETURN_IF_ERROR(synchronize(nullptr));

  DeviceCeilings ceilings;
  MOESAIC_ASSIGN_OR_RETURN(const double read_us, median_us(device, [&](void* stream) {
                             read_all<<<static_cast<unsigned>(kReadBlocks * sms), kReadThreads, 0,
                                        static_cast<cudaStream_t>(stream)>>>(
                                 buffer.as<uint4>(), bytes / 16, sink.as<std::uint32_t>());
                             return check_call("ceilings", cudaGetLastError());
                           }));
  ceilings.read_gbps = static_cast<double>(bytes) / read_us * 1e-3;
  MOESAIC_ASSIGN_OR_RETURN(
      const double product_us, median_us(device, [&](void* stream) {
        return fp8 ? launch_products<ptx::E4M3, true>(sms, sink.as<std::uint32_t>(), stream)
                   : launch_products<ptx::BF16, false>(sms, sink.as<std::uint32_t>(), stream);
      }));
  // A swizzle atom is 128 bytes of K.
  const double k = fp8 ? 128 : 64;
  ceilings.gflops = 2.0 * 128 * 256 * k * kProducts * sms / product_us * 1e-3;
  return ceilings;
}

}  // namespace moesaic::cuda
