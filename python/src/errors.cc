#include "errors.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <vector>

#include "core/fault.h"
#include "moesaic/log.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct Pending {
  std::mutex mutex;
  std::vector<std::string> texts;
  std::atomic<bool> any{false};
};
// Never destroyed: warnings may come from threads that outlive the interpreter.
Pending& pending() {
  static Pending* const p = new Pending;
  return *p;
}

}  // namespace

void raise(const Status& status) { raise(status.code(), status.message()); }

void raise(StatusCode code, const std::string& text) {
  if (PyErr_Occurred()) throw nb::python_error();
  const std::string_view name =
      status_code_name(MOESAIC_FAULT(python_every_error_internal) ? StatusCode::kInternal : code);
  const nb::object error =
      nb::module_::import_("moesaic._errors")
          .attr("make")(nb::str(name.data(), name.size()),
                        nb::steal(PyUnicode_DecodeUTF8(
                            text.data(), static_cast<Py_ssize_t>(text.size()), "replace")));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

void raise_not_cast(std::string_view field, nb::handle value, std::string_view need) {
  PyErr_Clear();
  constexpr std::size_t kShown = 80;
  std::string found = nb::repr(value).c_str();
  if (found.size() > kShown) found = found.substr(0, kShown) + "...";
  raise(StatusCode::kInvalidArgument, fmt::format("{}: got {}, need {}", field, found, need));
}

void install_log_sink() {
  set_log_sink([](std::string_view message) {
    Pending& p = pending();
    const std::lock_guard<std::mutex> lock(p.mutex);
    p.texts.emplace_back(message);
    p.any.store(true, std::memory_order_release);
  });
}

void drain_warnings() {
  Pending& p = pending();
  if (!p.any.load(std::memory_order_acquire)) return;
  // Of a callback's exception nothing may be imported or called; they are told next time.
  if (PyErr_Occurred() && !MOESAIC_FAULT(python_warnings_over_an_exception)) return;
  std::vector<std::string> texts;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    texts.swap(p.texts);
    p.any.store(false, std::memory_order_release);
  }
  const nb::object logger = nb::module_::import_("logging").attr("getLogger")("moesaic");
  for (const std::string& text : texts) logger.attr("warning")("%s", text);
}

}  // namespace moesaic::python
