#include "cuda/device_memory.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <utility>

namespace moesaic::cuda {

Status check_call(std::string_view what, int error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return {error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDevice,
          fmt::format("{}: {}", what, cudaGetErrorString(static_cast<cudaError_t>(error)))};
}

Allocation::Allocation(Allocation&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_) {}
Allocation& Allocation::operator=(Allocation&& other) noexcept {
  if (this == &other) return *this;
  release();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  device_ = other.device_;
  return *this;
}
Allocation::~Allocation() { release(); }

void Allocation::release() {
  if (data_ != nullptr) {
    const DeviceScope scope(device_);
    (void)cudaFree(data_);
  }
  data_ = nullptr;
  bytes_ = 0;
}

Status Allocation::reserve(std::string_view what, std::int64_t bytes) {
  release();
  if (bytes == 0) return {};
  const cudaError_t error = cudaMalloc(&data_, static_cast<std::size_t>(bytes));
  if (error != cudaSuccess) {
    data_ = nullptr;
    return check_call(fmt::format("{}: {} bytes", what, bytes), error);
  }
  bytes_ = bytes;
  device_ = current_device();
  return {};
}

PinnedHost::~PinnedHost() {
  if (data_ == nullptr) return;
  const DeviceScope scope(device_);
  (void)cudaFreeHost(data_);
}

Status PinnedHost::reserve(std::string_view what, std::int64_t bytes) {
  const cudaError_t error =
      cudaHostAlloc(&data_, static_cast<std::size_t>(bytes), cudaHostAllocPortable);
  device_ = current_device();
  if (error == cudaSuccess) return {};
  data_ = nullptr;
  return check_call(fmt::format("{}: {} bytes of pinned memory", what, bytes), error);
}

Status copy_to_device(std::string_view what, void* to, const void* from, std::int64_t bytes) {
  MOESAIC_RETURN_IF_ERROR(check_call(
      what, cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice)));
  // From pageable memory it returns when the bytes are on their way; a stream that does not wait for
  // the default one could read what was there before.
  return synchronize(nullptr);
}
Status copy_to_host(std::string_view what, void* to, const void* from, std::int64_t bytes) {
  return check_call(what,
                    cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost));
}
Status upload(std::string_view what, const void* from, std::int64_t bytes, Allocation& to) {
  MOESAIC_RETURN_IF_ERROR(to.reserve(what, bytes));
  return bytes == 0 ? Status() : copy_to_device(what, to.as<void>(), from, bytes);
}
Status copy_in_order(std::string_view what, void* to, const void* from, std::int64_t bytes,
                     void* stream) {
  MOESAIC_RETURN_IF_ERROR(
      check_call(what, cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                                       static_cast<cudaStream_t>(stream))));
  return synchronize(stream);
}
Status copy_on_device(std::string_view what, void* to, const void* from, std::int64_t bytes,
                      void* stream) {
  return check_call(
      what, cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                            static_cast<cudaStream_t>(stream)));
}
Status copy_rows_on_device(std::string_view what, void* to, std::int64_t to_pitch, const void* from,
                           std::int64_t from_pitch, std::int64_t row_bytes, std::int64_t rows,
                           void* stream) {
  const auto size = [](std::int64_t v) { return static_cast<std::size_t>(v); };
  return check_call(what, cudaMemcpy2DAsync(to, size(to_pitch), from, size(from_pitch),
                                            size(row_bytes), size(rows), cudaMemcpyDeviceToDevice,
                                            static_cast<cudaStream_t>(stream)));
}
Status fill_zero(std::string_view what, void* to, std::int64_t bytes, void* stream) {
  return check_call(what, cudaMemsetAsync(to, 0, static_cast<std::size_t>(bytes),
                                          static_cast<cudaStream_t>(stream)));
}

Status check_not_capturing(void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  MOESAIC_RETURN_IF_ERROR(
      check_call("stream", cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture)));
  if (capture == cudaStreamCaptureStatusNone) return {};
  return {StatusCode::kUnsupported,
          "stream: got one that is being captured, need none: ranks agree on sizes on the host"};
}

Status synchronize(void* stream) {
  return check_call("synchronize", cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

Result<int> require_hopper(int device) {
  int major = 0, minor = 0, sms = 0;
  for (const auto& [value, attribute] : {std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                                         std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
                                         std::pair{&sms, cudaDevAttrMultiProcessorCount}}) {
    MOESAIC_RETURN_IF_ERROR(check_call(fmt::format("device {}", device),
                                       cudaDeviceGetAttribute(value, attribute, device)));
  }
  if (major != 9 || minor != 0) {
    return Status(
        StatusCode::kDevice,
        fmt::format("device {}: got compute capability {}.{}, need 9.0", device, major, minor));
  }
  // What the least part of a MIG has; the gate's clusters of eight need that many.
  constexpr int kFewest = 16;
  if (sms < kFewest) {
    return Status(StatusCode::kDevice,
                  fmt::format("device {}: got {} multiprocessors, need {}", device, sms, kFewest));
  }
  return sms;
}

int current_device() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) (void)cudaGetLastError();
  return device;
}

Result<DeviceTraits> current_device_traits() {
  int device = 0, sms = 0;
  MOESAIC_RETURN_IF_ERROR(check_call("current device", cudaGetDevice(&device)));
  MOESAIC_RETURN_IF_ERROR(check_call(
      "current device", cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)));
  return hopper_traits(sms);
}

Status check_device_pointer(std::string_view field, const void* p, std::int64_t alignment,
                            int device) {
  if (p == nullptr) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got null, need memory of device {}", field, device)};
  }
  if (reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(alignment) != 0) {
    return {StatusCode::kInvalidLayout,
            fmt::format("{}: got an address that is not a multiple of {}", field, alignment)};
  }
  cudaPointerAttributes attributes = {};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, p);
  if (error != cudaSuccess) return check_call(field, error);
  const bool device_memory =
      attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  if (!device_memory) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got host memory, need memory of device {}", field, device)};
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: got memory of device {}, need device {}",
                                                      field, attributes.device, device)};
  }
  return {};
}

}  // namespace moesaic::cuda
