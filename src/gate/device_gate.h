// A gate whose tensors are on a GPU: what GateLinear is there, behind the same calls.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "gate/rounding.h"
#include "moesaic/gate.h"
#include "moesaic/status.h"

namespace moesaic::gate {

class DeviceGate {
 public:
  virtual ~DeviceGate() = default;
  // Shapes, dtypes and devices were checked; M > 0. router_logits has rounding.logits.
  // `workspace`: for the floats of 16-bit logits, large enough; none: of the device's pool.
  virtual Status forward(const ConstTensorView& hidden_states, const TensorView& router_logits,
                         const LogitRounding& rounding, Stream stream,
                         std::optional<std::span<std::byte>> workspace) const = 0;
};

// Host tensors as GateLinear::create has checked them, options.device a GPU. Errors of check_device,
// which in a build without CUDA refuses every GPU; kOutOfMemory, kDevice.
Result<std::unique_ptr<DeviceGate>> make_device_gate(const ConstTensorView& weight,
                                                     const ConstTensorView& bias,
                                                     const GateLinear::Options& options);

}  // namespace moesaic::gate
