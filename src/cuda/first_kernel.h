// What gives a stream its queue on the device.
#pragma once

namespace moesaic::cuda {

// A kernel that does nothing. Returns a cudaError_t.
int launch_nothing(void* stream);

}  // namespace moesaic::cuda
