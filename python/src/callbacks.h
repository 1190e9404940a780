// Python in the middle of a long call of the library: progress callbacks, and Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>

#include "moesaic/checkpoint.h"
#include "moesaic/experts.h"

namespace moesaic::python {

// Lives for one call that runs without the GIL. Once a callback raised or Ctrl-C was pressed the
// Python error stays set, `stop` answers true, and guarded sources fail: the caller's raise() then
// throws that error.
class CallGuard {
 public:
  // `progress` may be None; called with (done, total) in bytes.
  explicit CallGuard(nanobind::handle progress) : progress_(progress) {}

  ProgressFn progress();
  // Looks for signals; any thread, takes the GIL.
  bool stop();
  // The same experts, but the load ends at the next one after a stop.
  std::unique_ptr<ExpertSource> guard(std::unique_ptr<ExpertSource> source);
  // Whether an error is to be raised even though the call succeeded.
  bool stopped() const { return stopped_; }

 private:
  nanobind::handle progress_;
  std::atomic<bool> stopped_{false};
};

}  // namespace moesaic::python
