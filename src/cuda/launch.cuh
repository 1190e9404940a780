// A launch that returns its own error.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace moesaic::cuda {

// kernel<<<grid, threads, shared_bytes, stream>>>(args...). cudaGetLastError() after that would also
// report what an earlier call of the same thread, the caller's own, has left behind. Returns a
// cudaError_t value.
template <class... Params, class... Args>
int launch_kernel(void (*kernel)(Params...), dim3 grid, unsigned threads, std::size_t shared_bytes,
                  void* stream, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Blocks of a loop over `count` elements that any number of blocks goes through, `threads` a block.
inline unsigned looping_blocks(std::int64_t count, std::int64_t threads) {
  constexpr std::int64_t kMost = 65536;
  const std::int64_t blocks = (count + threads - 1) / threads;
  return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}

}  // namespace moesaic::cuda
