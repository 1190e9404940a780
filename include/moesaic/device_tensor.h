// Tensors on any device, so that one program serves the CPU and a GPU without the CUDA runtime's
// headers. No arithmetic here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "moesaic/device.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// An owning, contiguous tensor on a device, aligned to 64 bytes, on a GPU to 256. Movable, not
// copyable.
class DeviceTensor {
 public:
  DeviceTensor();  // nothing
  // Contents undefined. Errors of check_device; kLimitExceeded, kInvalidShape (contiguous_bytes),
  // kOutOfMemory.
  static Result<DeviceTensor> uninitialized(Device device, DType dtype, const Shape& shape);
  // A copy of a contiguous tensor, which may be elsewhere; waits for it. Errors of copy_tensor.
  static Result<DeviceTensor> copy_of(const ConstTensorView& from, Device device);

  // Views say where the memory is.
  TensorView view() { return {data(), dtype_, shape_, device_}; }
  ConstTensorView view() const { return {data(), dtype_, shape_, device_}; }
  std::byte* data() const;
  // As a workspace: ExpertsArgs::workspace and the like.
  std::span<std::byte> span() const { return {data(), static_cast<std::size_t>(bytes_)}; }
  std::int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  DeviceTensor(DeviceTensor&&) noexcept;
  DeviceTensor& operator=(DeviceTensor&&) noexcept;
  ~DeviceTensor();

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
  DType dtype_ = DType::kF32;
  Shape shape_;
  std::int64_t bytes_ = 0;
  Device device_ = Device::cpu();
};

// Copies one contiguous tensor to another of the same dtype and shape, after everything on `stream`
// (of the GPU of the two; not looked at between host tensors), and waits until it is there.
// kInvalidShape, kInvalidDType, kInvalidLayout, kInvalidArgument (null), kAliasing; kUnsupported
// between two GPUs; kDevice.
Status copy_tensor(const ConstTensorView& from, const TensorView& to, Stream stream = {});
// Waits for everything on a stream of a device; nothing on the CPU. kDevice also for errors of
// kernels launched before.
Status synchronize(Device device, Stream stream = {});

}  // namespace moesaic
