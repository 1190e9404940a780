#include "cuda/device_timer.h"

#include <cuda_runtime.h>

#include <chrono>
#include <new>
#include <utility>

#include "cuda/device_memory.h"

namespace moesaic::cuda {

struct DeviceTimer::Impl {
  int device = 0;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;

  // Of a replay, the mean of `count`.
  Result<double> microseconds(int count) const;

  ~Impl() {
    const DeviceScope scope(device);
    if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    if (begin != nullptr) (void)cudaEventDestroy(begin);
    if (end != nullptr) (void)cudaEventDestroy(end);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
};

DeviceTimer::DeviceTimer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceTimer::~DeviceTimer() = default;

Result<std::unique_ptr<DeviceTimer>> DeviceTimer::create(
    int device, const std::function<Status(void* stream)>& enqueue) {
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate a timer");
  impl->device = device;
  const DeviceScope scope(device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_RETURN_IF_ERROR(
      check_call("stream", cudaStreamCreateWithFlags(&impl->stream, cudaStreamNonBlocking)));
  MOESAIC_RETURN_IF_ERROR(check_call("event", cudaEventCreate(&impl->begin)));
  MOESAIC_RETURN_IF_ERROR(check_call("event", cudaEventCreate(&impl->end)));
  MOESAIC_RETURN_IF_ERROR(enqueue(impl->stream));
  MOESAIC_RETURN_IF_ERROR(synchronize(impl->stream));
  MOESAIC_RETURN_IF_ERROR(check_call(
      "capture", cudaStreamBeginCapture(impl->stream, cudaStreamCaptureModeThreadLocal)));
  const Status captured = enqueue(impl->stream);
  MOESAIC_RETURN_IF_ERROR(check_call("capture", cudaStreamEndCapture(impl->stream, &impl->graph)));
  MOESAIC_RETURN_IF_ERROR(captured);
  MOESAIC_RETURN_IF_ERROR(check_call("graph", cudaGraphInstantiate(&impl->exec, impl->graph, 0)));
  std::unique_ptr<DeviceTimer> timer(new (std::nothrow) DeviceTimer(std::move(impl)));
  if (!timer) return Status(StatusCode::kOutOfMemory, "cannot allocate a timer");
  return timer;
}

Result<double> DeviceTimer::Impl::microseconds(int count) const {
  MOESAIC_RETURN_IF_ERROR(check_call("event", cudaEventRecord(begin, stream)));
  for (int i = 0; i < count; ++i) {
    MOESAIC_RETURN_IF_ERROR(check_call("graph", cudaGraphLaunch(exec, stream)));
  }
  MOESAIC_RETURN_IF_ERROR(check_call("event", cudaEventRecord(end, stream)));
  MOESAIC_RETURN_IF_ERROR(check_call("graph", cudaEventSynchronize(end)));
  float ms = 0;
  MOESAIC_RETURN_IF_ERROR(check_call("event", cudaEventElapsedTime(&ms, begin, end)));
  return 1e3 * static_cast<double>(ms) / count;
}

Result<std::vector<double>> DeviceTimer::replay(int min_samples, double seconds) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t kMaxSamples = 10000;
  constexpr int kWarmUp = 2;
  const Impl& m = *impl_;
  const DeviceScope scope(m.device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  std::vector<double> samples;
  const auto start = Clock::now();
  for (int replay = 0;; ++replay) {
    const double spent = std::chrono::duration<double>(Clock::now() - start).count();
    const auto taken = samples.size();
    if (taken >= kMaxSamples ||
        (taken >= static_cast<std::size_t>(min_samples) && spent >= seconds)) {
      return samples;
    }
    MOESAIC_ASSIGN_OR_RETURN(const double us, m.microseconds(1));
    if (replay >= kWarmUp) samples.push_back(us);
  }
}

Result<double> DeviceTimer::mean_of(int count) const {
  const Impl& m = *impl_;
  const DeviceScope scope(m.device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_RETURN_IF_ERROR(check_call("graph", cudaGraphLaunch(m.exec, m.stream)));
  return m.microseconds(count);
}

}  // namespace moesaic::cuda
