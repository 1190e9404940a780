// Setting up a kernel on every device that launches it. CUDA sources only.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace moesaic::cuda {

// Function attributes belong to a device's context, so once per process is not enough where a
// process uses several devices. Make one static object per kernel. Threads may race: the set-up is
// then done twice, which must be harmless.
class OncePerDevice {
 public:
  // Runs `set_up` on the current device unless it succeeded there before; its error, or success.
  template <class SetUp>
  cudaError_t operator()(const SetUp& set_up) {
    int device = 0;
    const cudaError_t found = cudaGetDevice(&device);
    if (found != cudaSuccess) return found;
    // Devices past the 64th are set up at every launch.
    const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((done_.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    const cudaError_t error = set_up();
    if (error == cudaSuccess) done_.fetch_or(bit, std::memory_order_release);
    return error;
  }

 private:
  std::atomic<std::uint64_t> done_{0};
};

}  // namespace moesaic::cuda
