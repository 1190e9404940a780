// Fault points in kernels: as core/fault.h, for device code. MOESAIC_CUDA_FAULT(name, statements)
// is nothing in an ordinary build, so that kernels are what they would be without it. In a build
// with MOESAIC_FAULT_INJECTION the statements are run when the environment variable MOESAIC_FAULT
// equals the name and the host function that launches the kernel has said
// MOESAIC_ARM_CUDA_FAULTS(). A fault may make results wrong; it must not make a kernel wait for
// ever, nor read or write outside of its arrays.
#pragma once

#ifdef MOESAIC_FAULT_INJECTION
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/fault.h"
#include "cuda/once_per_device.h"

namespace moesaic::cuda {

constexpr std::uint64_t fault_code(const char* name) {
  std::uint64_t code = 0xCBF29CE484222325U;
  for (; *name != 0; ++name) {
    code = (code ^ static_cast<unsigned char>(*name)) * 0x100000001B3U;
  }
  return code;
}

// Each translation unit with kernels has its own.
[[maybe_unused]] static __device__ std::uint64_t injected_fault;

// Allowed while a stream is being captured.
[[maybe_unused]] static cudaError_t arm_cuda_faults() {
  static OncePerDevice once;
  return once([] {
    const std::uint64_t code = fault_code(active_fault());
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaStream_t stream = nullptr;
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
      error = cudaMemcpyToSymbolAsync(injected_fault, &code, sizeof(code), 0,
                                      cudaMemcpyHostToDevice, stream);
      if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
  });
}

}  // namespace moesaic::cuda
#define MOESAIC_CUDA_FAULT(name, ...)                                                         \
  if (::moesaic::cuda::injected_fault ==                                                      \
      ::std::integral_constant<::std::uint64_t, ::moesaic::cuda::fault_code(#name)>::value) { \
    __VA_ARGS__                                                                               \
  }
#define MOESAIC_ARM_CUDA_FAULTS() static_cast<void>(::moesaic::cuda::arm_cuda_faults())
#else
#define MOESAIC_CUDA_FAULT(name, ...)
#define MOESAIC_ARM_CUDA_FAULTS() static_cast<void>(0)
#endif
