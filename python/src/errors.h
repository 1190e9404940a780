// Failures of the library as Python exceptions: a class for each code, with the library's text.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <utility>

#include "moesaic/status.h"

namespace moesaic::python {

// Raises the class of moesaic._errors that belongs to the code. The GIL is held. A Python error that
// is already set (Ctrl-C, a callback that raised) goes first: it is the cause.
[[noreturn]] void raise(const Status& status);
[[noreturn]] void raise(StatusCode code, const std::string& text);

// "field: got repr(value), need ..."
[[noreturn]] void raise_not_cast(std::string_view field, nanobind::handle value,
                                 std::string_view need);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}
template <class T>
T unwrap(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

// A Python value as T. kInvalidArgument, which names the field, where it is none; `need` says what is
// one.
template <class T>
T cast_as(std::string_view field, nanobind::handle value, std::string_view need) {
  T made{};
  if (!nanobind::try_cast<T>(value, made)) raise_not_cast(field, value, need);
  return made;
}

// Hands warnings that the library gave since the last call to the Python logger "moesaic". The sink
// itself only notes them, so that the library never waits for the GIL. Free when there are none.
void install_log_sink();
void drain_warnings();

}  // namespace moesaic::python
