// What is thrown must not cross our API, and between ranks not keep the others waiting either.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <new>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic {

// The status of call(), with `what` in front; kInvalidArgument for an exception.
template <class Call>
Status guarded(std::string_view what, Call&& call) {
  try {
    return call().with_context(what);
  } catch (const std::exception& e) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: threw \"{}\"", what, e.what())};
  } catch (...) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: threw", what)};
  }
}

// What call() returns, a Status or a Result, or what it threw in the place of that: kOutOfMemory for
// memory that nobody could have, else kInternal.
template <class Call>
auto without_exceptions(std::string_view what, Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, fmt::format("{}: cannot allocate memory", what));
  } catch (const std::exception& e) {
    return Status(StatusCode::kInternal, fmt::format("{}: threw \"{}\"", what, e.what()));
  }
}

}  // namespace moesaic
