// Discovery through the CUDA runtime. It is linked statically, so without a driver it answers with
// an error code and nothing here can fail to load.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include "moesaic/device.h"

namespace moesaic {
namespace {

CudaDeviceInfo describe(int index) {
  CudaDeviceInfo info;
  info.index = index;
  cudaDeviceProp properties = {};
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    info.reason = cudaGetErrorString(error);
    return info;
  }
  info.name = properties.name;
  info.sm_major = properties.major;
  info.sm_minor = properties.minor;
  info.num_sms = properties.multiProcessorCount;
  info.total_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  // The kernels use instructions that exist on sm_90a alone, not on its successors.
  info.available = properties.major == 9 && properties.minor == 0;
  if (!info.available) {
    info.reason =
        fmt::format("got compute capability {}.{}, need 9.0", properties.major, properties.minor);
  }
  return info;
}

}  // namespace

CudaInfo query_cuda() {
  CudaInfo info;
  info.built = true;
  // Both answer without a driver: the versions are then 0 and the runtime's own.
  if (cudaDriverGetVersion(&info.driver_version) != cudaSuccess) info.driver_version = 0;
  if (cudaRuntimeGetVersion(&info.runtime_version) != cudaSuccess) info.runtime_version = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error != cudaSuccess) {
    info.reason =
        info.driver_version == 0 ? "no CUDA driver on this machine" : cudaGetErrorString(error);
    return info;
  }
  for (int i = 0; i < count; ++i) {
    info.devices.push_back(describe(i));
    info.available = info.available || info.devices.back().available;
  }
  if (count == 0) info.reason = "no CUDA device is visible";
  if (count > 0 && !info.available) {
    info.reason = fmt::format("no usable device among {}: {}: {}", count, info.devices.front().name,
                              info.devices.front().reason);
  }
  return info;
}

}  // namespace moesaic
