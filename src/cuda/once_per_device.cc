#include "cuda/once_per_device.h"

#include <atomic>

namespace moesaic::cuda {

cudaError_t OncePerDevice::bit_of_current_device(std::uint64_t* bit) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  *bit = device < 64 ? std::uint64_t{1} << device : 0;
  return error;
}

bool OncePerDevice::has(std::uint64_t bit) {
  return (std::atomic_ref(done_).load(std::memory_order_acquire) & bit) != 0;
}

void OncePerDevice::add(std::uint64_t bit) {
  std::atomic_ref(done_).fetch_or(bit, std::memory_order_release);
}

}  // namespace moesaic::cuda
