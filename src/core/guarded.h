// Calls of a caller's functions: what they throw must not cross our API.
#pragma once

#include <fmt/format.h>

#include <exception>
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

}  // namespace moesaic
