// Time on the device: work captured into a CUDA graph and replayed between events, and the ceilings
// that a benchmark quotes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::cuda {

// What `enqueue` puts on the stream it is given, once captured and then replayed.
class DeviceTimer {
 public:
  // Runs the work once plainly (modules load, errors show), then captures it, on a stream of its
  // own. kDevice, or the error of `enqueue`.
  static Result<std::unique_ptr<DeviceTimer>> create(
      int device, const std::function<Status(void* stream)>& enqueue);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  // Microseconds of each replay, after two that are not counted: at least `min_samples` of them and
  // for at least `seconds`, at most 10000.
  Result<std::vector<double>> replay(int min_samples, double seconds) const;
  // Microseconds of a replay, the mean of `count` behind one that is not counted: ranks that wait for
  // each other on the device replay as often as each other.
  Result<double> mean_of(int count) const;

 private:
  struct Impl;
  explicit DeviceTimer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct DeviceCeilings {
  double read_gbps = 0;  // of a kernel that only reads, over up to 4 GiB
  double gflops = 0;     // dense wgmma products out of shared memory, random operands
};
// Sustained rates: takes about a second and up to 4 GiB of device memory, given back. kDevice,
// kOutOfMemory.
//   fp8  e4m3 operands, else bf16
Result<DeviceCeilings> measure_device_ceilings(int device, bool fp8);

}  // namespace moesaic::cuda
