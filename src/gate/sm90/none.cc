// A build without CUDA: a gate on a GPU refuses.
#include "gate/device_gate.h"

namespace moesaic::gate {

Result<std::unique_ptr<DeviceGate>> make_device_gate(const ConstTensorView&, const ConstTensorView&,
                                                     const GateLinear::Options& options) {
  return check_device(options.device);
}

}  // namespace moesaic::gate
