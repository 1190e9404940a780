// What load balancing remembers between steps: the window of loads.
#include <fmt/format.h>

#include <new>

#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/eplb.h"

namespace moesaic {

Result<LoadWindow> LoadWindow::create(std::int64_t num_logical, std::int64_t window) {
  const auto total = checked_mul(num_logical, window);
  if (num_logical > 0 && window > 0 && !total) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("window: got {} steps of {} experts, need fewer than 2^63 of both",
                              window, num_logical));
  }
  if (num_logical < 1 || window < 1) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("window: got {} steps of {} experts, need >= 1 of both", window, num_logical));
  }
  try {
    LoadWindow w;
    w.num_logical_ = num_logical;
    w.window_ = window;
    w.steps_.assign(static_cast<std::size_t>(*total), 0.0);
    w.sum_.assign(static_cast<std::size_t>(num_logical), 0.0);
    return w;
  } catch (const std::exception&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("window: cannot allocate {} loads", *total));
  }
}

Status LoadWindow::record(std::span<const std::int32_t> physical_load,
                          std::span<const std::int32_t> physical_to_logical) {
  if (physical_load.size() != physical_to_logical.size()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("physical_load: got {} slots, the map has {}", physical_load.size(),
                        physical_to_logical.size())};
  }
  for (const std::int32_t e : physical_to_logical) {
    if (e >= 0 && e < num_logical_) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("physical_to_logical: got {}, need 0 .. {}", e, num_logical_ - 1)};
  }
  // Loads are integers, so adding and taking away leaves no rounding behind.
  double* step = steps_.data() + next_ * num_logical_;
  for (std::int64_t e = 0; e < num_logical_; ++e) {
    if (!MOESAIC_FAULT(eplb_window_never_forgets)) sum_[static_cast<std::size_t>(e)] -= step[e];
    step[e] = 0;
  }
  for (std::size_t s = 0; s < physical_load.size(); ++s) {
    step[physical_to_logical[s]] += physical_load[s];
    sum_[static_cast<std::size_t>(physical_to_logical[s])] += physical_load[s];
  }
  next_ = (next_ + 1) % window_;
  return {};
}

}  // namespace moesaic
