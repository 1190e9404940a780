// What the transports between GPUs ask of the rows that they are given.
#pragma once

#include <cstdint>

#include "moesaic/device.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

struct DeviceRows {
  std::int64_t max_tokens = 0, hidden = 0, top_k = 0;
  Device device = Device::cpu();
  DType dtype = DType::kBF16;
  std::int64_t alignment = 16;  // of hidden_states, in bytes
};

// hidden_states [M, hidden] of dtype, topk_ids [M, top_k] I32 and topk_weights [M, top_k] F32, contiguous
// in memory of `device`, M <= max_tokens; else the status of the first that is not, with its name.
Status check_device_rows(const DeviceRows& need, const PrepareArgs& args);

}  // namespace moesaic::cuda
