// When an engine's load balancer records and rearranges.
#include <fmt/format.h>

#include "moesaic/interop/parallel.h"

namespace moesaic {

EplbSchedule::EplbSchedule(const Options& options)
    : options_(options), step_(options.interval - options.interval / 4) {}

Result<EplbSchedule> EplbSchedule::create(const Options& options) {
  if (options.window < 1 || options.interval < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("window, interval: got {} and {}, need numbers >= 1", options.window,
                              options.interval));
  }
  return EplbSchedule(options);
}

bool EplbSchedule::advance(bool in_flight) {
  ++step_;
  if (step_ < options_.interval || in_flight) return false;
  step_ = 0;
  return true;
}

}  // namespace moesaic
