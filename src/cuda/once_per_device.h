// Setting up a kernel on every device that launches it. CUDA sources only, which read this header in
// every file with kernels: nothing of the standard library that takes long.
#pragma once

#include <cuda_runtime.h>

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
    std::uint64_t bit = 0;
    cudaError_t error = bit_of_current_device(&bit);
    if (error != cudaSuccess || has(bit)) return error;
    error = set_up();
    if (error == cudaSuccess) add(bit);
    return error;
  }

 private:
  // Devices past the 64th have none: they are set up at every launch.
  static cudaError_t bit_of_current_device(std::uint64_t* bit);
  bool has(std::uint64_t bit);
  void add(std::uint64_t bit);

  alignas(8) std::uint64_t done_ = 0;  // atomic
};

}  // namespace moesaic::cuda
