#include "moesaic/device_tensor.h"

#include <fmt/format.h>

#include <cstring>
#include <new>
#include <utility>

#include "cuda/device_memory.h"

namespace moesaic {

// One of the two.
struct DeviceTensor::Memory {
  Tensor host;
  cuda::Allocation gpu;
};

DeviceTensor::DeviceTensor() = default;
DeviceTensor::DeviceTensor(DeviceTensor&&) noexcept = default;
DeviceTensor& DeviceTensor::operator=(DeviceTensor&&) noexcept = default;
DeviceTensor::~DeviceTensor() = default;

std::byte* DeviceTensor::data() const {
  if (!memory_) return nullptr;
  return device_.is_cuda() ? memory_->gpu.as<std::byte>() : memory_->host.data();
}

Result<DeviceTensor> DeviceTensor::uninitialized(Device device, DType dtype, const Shape& shape) {
  MOESAIC_RETURN_IF_ERROR(check_device(device));
  DeviceTensor t;
  t.dtype_ = dtype;
  t.shape_ = shape;
  t.device_ = device;
  MOESAIC_ASSIGN_OR_RETURN(t.bytes_, contiguous_bytes(dtype, shape));
  t.memory_.reset(new (std::nothrow) Memory());
  if (!t.memory_) return Status(StatusCode::kOutOfMemory, "cannot allocate a tensor object");
  if (device.is_cuda()) {
    const cuda::DeviceScope scope(device.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_RETURN_IF_ERROR(
        t.memory_->gpu.reserve(fmt::format("tensor {}", shape.to_string()), t.bytes_));
  } else {
    MOESAIC_ASSIGN_OR_RETURN(t.memory_->host, Tensor::uninitialized(dtype, shape));
  }
  return t;
}

Result<DeviceTensor> DeviceTensor::copy_of(const ConstTensorView& from, Device device) {
  MOESAIC_ASSIGN_OR_RETURN(DeviceTensor t, uninitialized(device, from.dtype, from.shape));
  MOESAIC_RETURN_IF_ERROR(copy_tensor(from, t.view()));
  return t;
}

Status copy_tensor(const ConstTensorView& from, const TensorView& to, Stream stream) {
  MOESAIC_RETURN_IF_ERROR(expect_dtype("to", to, from.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape("to", to, from.shape));
  MOESAIC_RETURN_IF_ERROR(expect_shape("from", from, from.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("from", from));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("to", to));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("to", to, "from", from));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(from.dtype, from.shape));
  if (bytes == 0) return {};
  if (!from.device.is_cuda() && !to.device.is_cuda()) {
    std::memcpy(to.data, from.data, static_cast<std::size_t>(bytes));
    return {};
  }
  if (from.device.is_cuda() && to.device.is_cuda() && !(from.device == to.device)) {
    return {StatusCode::kUnsupported,
            fmt::format("copy: got a tensor of {} and one of {}, need one GPU or the host",
                        from.device.to_string(), to.device.to_string())};
  }
  const Device device = from.device.is_cuda() ? from.device : to.device;
  const cuda::DeviceScope scope(device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  // Not on the default stream: what it waits for may wait for the caller's next work.
  return cuda::copy_in_order("copy", to.data, from.data, bytes, stream.handle);
}

Status synchronize(Device device, Stream stream) {
  if (!device.is_cuda()) return {};
  const cuda::DeviceScope scope(device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  return cuda::synchronize(stream.handle);
}

}  // namespace moesaic
