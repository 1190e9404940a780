// CudaGate as a GateLinear: views and a stream in, a launch out.
#include "gate/device_gate.h"

#include <new>
#include <utility>

#include "cuda/device_memory.h"
#include "gate/sm90/gate_linear.h"

namespace moesaic::gate {
namespace {

class Sm90Gate final : public DeviceGate {
 public:
  Sm90Gate(Device device, cuda::CudaGate gate) : device_(device), gate_(std::move(gate)) {}

  Status forward(const ConstTensorView& x, const TensorView& logits, Stream stream) const override {
    MOESAIC_RETURN_IF_ERROR(expect_contiguous("hidden_states", x));
    const cuda::DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_RETURN_IF_ERROR(
        cuda::check_device_pointer("hidden_states", x.data, 16, device_.index()));
    MOESAIC_RETURN_IF_ERROR(
        cuda::check_device_pointer("router_logits", logits.data, 4, device_.index()));
    return gate_.enqueue(stream.handle, x.data, x.dtype, x.dim(0), logits.as<float>());
  }

 private:
  Device device_;
  cuda::CudaGate gate_;
};

}  // namespace

Result<std::unique_ptr<DeviceGate>> make_device_gate(const ConstTensorView& weight,
                                                     const ConstTensorView& bias,
                                                     const GateLinear::Options& options) {
  MOESAIC_RETURN_IF_ERROR(check_device(options.device));
  const cuda::DeviceScope scope(options.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(cuda::CudaGate gate, cuda::CudaGate::create(weight, bias));
  std::unique_ptr<DeviceGate> made(new (std::nothrow) Sm90Gate(options.device, std::move(gate)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the gate");
  return made;
}

}  // namespace moesaic::gate
