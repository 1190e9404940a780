#include "cuda/last_call.h"

#include <cuda_runtime.h>

#include "core/fault.h"
#include "cuda/device_memory.h"

namespace moesaic::cuda {

LastCall::~LastCall() {
  if (event_ == nullptr) return;
  const DeviceScope scope(device_);
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

Status LastCall::create() {
  cudaEvent_t event = nullptr;
  MOESAIC_RETURN_IF_ERROR(
      check_call("last call", cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
  event_ = event;
  device_ = current_device();
  return {};
}

Status LastCall::end(void* stream) {
  auto* const s = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  MOESAIC_RETURN_IF_ERROR(check_call("last call", cudaStreamIsCapturing(s, &capture)));
  if (capture != cudaStreamCaptureStatusNone) return {};
  any_ = true;
  return check_call("last call", cudaEventRecord(static_cast<cudaEvent_t>(event_), s));
}

Status LastCall::before(void* stream) const {
  if (!any_ || MOESAIC_FAULT(cuda_last_call_is_not_waited_for)) return {};
  return check_call("last call", cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                                                     static_cast<cudaEvent_t>(event_), 0));
}

}  // namespace moesaic::cuda
