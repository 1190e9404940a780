#include "cuda/stream_allocation.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include "cuda/device_memory.h"

namespace moesaic::cuda {

StreamAllocation::~StreamAllocation() {
  if (data_ != nullptr) (void)cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_));
}

Status StreamAllocation::reserve(std::string_view what, std::int64_t bytes) {
  const cudaError_t error =
      cudaMallocAsync(&data_, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream_));
  if (error == cudaSuccess) return {};
  data_ = nullptr;
  return check_call(fmt::format("{}: {} bytes", what, bytes), error);
}

}  // namespace moesaic::cuda
