// CudaGate as a GateLinear: views and a stream in, a launch out.
#include "gate/device_gate.h"

#include <new>
#include <utility>

#include "cuda/dense_rows.h"
#include "cuda/device_memory.h"
#include "cuda/stream_allocation.h"
#include "gate/sm90/gate_linear.h"

namespace moesaic::gate {
namespace {

class Sm90Gate final : public DeviceGate {
 public:
  Sm90Gate(Device device, cuda::CudaGate gate) : device_(device), gate_(std::move(gate)) {}

  Status forward(const ConstTensorView& hidden_states, const TensorView& logits,
                 const LogitRounding& rounding, Stream stream,
                 std::optional<std::span<std::byte>> workspace) const override {
    MOESAIC_RETURN_IF_ERROR(cuda::expect_rows("hidden_states", hidden_states));
    const cuda::DeviceScope scope(device_.index());
    MOESAIC_RETURN_IF_ERROR(scope.status());
    MOESAIC_RETURN_IF_ERROR(cuda::check_device_pointer(
        "router_logits", logits.data, dtype_bits(logits.dtype) / 8, device_.index()));
    cuda::DenseRows dense(stream.handle);
    MOESAIC_ASSIGN_OR_RETURN(const ConstTensorView x, dense.of("hidden_states", hidden_states, 16));
    const std::int64_t count = x.dim(0) * gate_.num_experts();
    if (logits.dtype != DType::kF32) {
      if (!workspace) return through_pool(x, count, logits, rounding, stream);
      MOESAIC_RETURN_IF_ERROR(
          cuda::check_device_pointer("workspace", workspace->data(), 256, device_.index()));
      return through_floats(x, reinterpret_cast<float*>(workspace->data()), count, logits, rounding,
                            stream);
    }
    MOESAIC_RETURN_IF_ERROR(
        gate_.enqueue(stream.handle, x.data, x.dtype, x.dim(0), logits.as<float>()));
    return cuda::round_logits(logits.as<float>(), count, rounding, logits.data, logits.dtype,
                              stream.handle);
  }

 private:
  Status through_pool(const ConstTensorView& x, std::int64_t count, const TensorView& logits,
                      const LogitRounding& rounding, Stream stream) const {
    cuda::StreamAllocation sums(stream.handle);
    MOESAIC_RETURN_IF_ERROR(sums.reserve("gate: fp32 logits", count * 4));
    return through_floats(x, sums.as<float>(), count, logits, rounding, stream);
  }
  // The kernels write fp32.
  Status through_floats(const ConstTensorView& x, float* sums, std::int64_t count,
                        const TensorView& logits, const LogitRounding& rounding,
                        Stream stream) const {
    MOESAIC_RETURN_IF_ERROR(gate_.enqueue(stream.handle, x.data, x.dtype, x.dim(0), sums));
    return cuda::round_logits(sums, count, rounding, logits.data, logits.dtype, stream.handle);
  }

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
