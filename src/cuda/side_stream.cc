#include "cuda/side_stream.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "cuda/first_kernel.h"

namespace moesaic::cuda {
namespace {

Status order(const char* what, void* from, void* event, void* to) {
  MOESAIC_RETURN_IF_ERROR(check_call(
      what, cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(from))));
  return check_call(
      what, cudaStreamWaitEvent(static_cast<cudaStream_t>(to), static_cast<cudaEvent_t>(event), 0));
}

}  // namespace

SideStream::~SideStream() {
  if (stream_ == nullptr) return;
  const DeviceScope scope(device_);
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
  for (void* const event : {forked_, joined_}) {
    if (event != nullptr) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
}

Status SideStream::create(int priority) {
  cudaStream_t stream = nullptr;
  MOESAIC_RETURN_IF_ERROR(check_call(
      "second stream", cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority)));
  stream_ = stream;
  device_ = current_device();
  for (void** const event : {&forked_, &joined_}) {
    cudaEvent_t made = nullptr;
    MOESAIC_RETURN_IF_ERROR(
        check_call("second stream", cudaEventCreateWithFlags(&made, cudaEventDisableTiming)));
    *event = made;
  }
  // A stream has its queue on the device from its first kernel on (an event is not enough). Not in a
  // call, where a kernel of another layer may wait for this one.
  MOESAIC_RETURN_IF_ERROR(check_call("second stream", launch_nothing(stream_)));
  return synchronize(stream_);
}

Status SideStream::fork(void* stream) { return order("fork", stream, forked_, stream_); }
Status SideStream::join(void* stream) {
  if (MOESAIC_FAULT(cuda_second_stream_not_joined)) return {};
  return order("join", stream_, joined_, stream);
}

Result<SideStream*> SideStreams::beside(void* stream) {
  int priority = 0;
  MOESAIC_RETURN_IF_ERROR(check_call(
      "second stream", cudaStreamGetPriority(static_cast<cudaStream_t>(stream), &priority)));
  if (MOESAIC_FAULT(cuda_second_stream_of_any_priority)) priority = 0;
  const auto at = static_cast<std::size_t>(-priority);
  if (at >= of_.size()) {
    return unsupported(
        fmt::format("stream: got one of priority {}, need 0 to -{}", priority, of_.size() - 1));
  }
  SideStream& side = of_[at];
  if (side.handle() != nullptr) return &side;
  // Its first use is waited for, whatever is being captured meanwhile.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  MOESAIC_RETURN_IF_ERROR(check_call("second stream", cudaThreadExchangeStreamCaptureMode(&mode)));
  const Status made = side.create(priority);
  MOESAIC_RETURN_IF_ERROR(check_call("second stream", cudaThreadExchangeStreamCaptureMode(&mode)));
  MOESAIC_RETURN_IF_ERROR(made);
  return &side;
}

}  // namespace moesaic::cuda
