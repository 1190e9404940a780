// Turns the allocation failures that outside sizes can cause into a Status.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Runs f() (returning Status or Result<T>); std::bad_alloc and std::length_error become
// kOutOfMemory.
template <class F>
auto guard_allocation(std::string_view label, F&& f) -> decltype(f()) {
  try {
    return std::forward<F>(f)();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, std::string(label) + ": out of memory");
  } catch (const std::length_error&) {
    return Status(StatusCode::kOutOfMemory, std::string(label) + ": a size exceeds the allocator");
  }
}

}  // namespace moesaic::checkpoint
