#include <cuda.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <array>
#include <atomic>

#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "cuda/driver.h"

namespace moesaic::cuda {

Result<void*> driver_function(const char* name, int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  MOESAIC_RETURN_IF_ERROR(check_call(
      name, cudaGetDriverEntryPointByVersion(name, &function, static_cast<unsigned>(version),
                                             cudaEnableDefault, &found)));
#else
  static_cast<void>(version);
  MOESAIC_RETURN_IF_ERROR(
      check_call(name, cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found)));
#endif
  if (function == nullptr || found != cudaDriverEntryPointSuccess) {
    return unsupported(fmt::format("the CUDA driver has no {}", name));
  }
  return function;
}

namespace {

// The stack of contexts of a thread. What a device has first is its primary context, which the
// runtime uses too. Errors have the runtime's numbers.
struct Contexts {
  CUresult (*retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
  Status found;
};

const Contexts& contexts() {
  static const Contexts all = [] {
    Contexts c;
    const auto find = [&](const char* name, int version, auto& function) {
      const Result<void*> pointer = driver_function(name, version);
      if (!pointer.ok()) {
        c.found = c.found.ok() ? pointer.status() : c.found;
        return;
      }
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(*pointer);
    };
    find("cuDevicePrimaryCtxRetain", 7000, c.retain);
    find("cuCtxPushCurrent", 4000, c.push);
    find("cuCtxPopCurrent", 4000, c.pop);
    return c;
  }();
  return all;
}

// Kept for good: to ask again takes a lock of the driver's.
CUresult primary_context(int device, CUcontext& context) {
  static std::array<std::atomic<CUcontext>, 64> kept = {};
  const bool keeps = device >= 0 && device < static_cast<int>(kept.size());
  const auto at = static_cast<std::size_t>(keeps ? device : 0);
  context = keeps ? kept[at].load(std::memory_order_acquire) : nullptr;
  if (context != nullptr) return CUDA_SUCCESS;
  const CUresult error = contexts().retain(&context, device);
  if (error == CUDA_SUCCESS && keeps) kept[at].store(context, std::memory_order_release);
  return error;
}

}  // namespace

DeviceScope::DeviceScope(int device) : device_(device) {
  if (!contexts().found.ok()) {
    error_ = cudaErrorInsufficientDriver;
    return;
  }
  CUcontext context = nullptr;
  CUresult error = primary_context(device, context);
  if (error == CUDA_SUCCESS) error = contexts().push(context);
  error_ = static_cast<int>(error);
  pushed_ = error == CUDA_SUCCESS;
}
DeviceScope::~DeviceScope() {
  if (!pushed_ || MOESAIC_FAULT(cuda_device_scope_stays)) return;
  CUcontext context = nullptr;
  static_cast<void>(contexts().pop(&context));
}
Status DeviceScope::status() const {
  MOESAIC_RETURN_IF_ERROR(contexts().found);
  return check_call(fmt::format("device {}", device_), error_);
}

}  // namespace moesaic::cuda
