// Python's lock around calls of the library, and within its callbacks.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include "core/fault.h"

namespace moesaic::python {

// Until Python 3.14 a thread that asks for the lock while the interpreter ends is ended by
// pthread_exit, which unwinds its frames: out of a destructor, which ends the process with SIGABRT, or
// through others that touch objects without the lock. So such a thread (a daemon one: Python waits
// for the others) stays where it is, as it does from 3.14 on, until the process has ended.
template <class Ask>
auto ask_for_gil(const Ask& ask) {
  try {
    return ask();
  } catch (abi::__forced_unwind&) {
    if (MOESAIC_FAULT(python_thread_ended_in_a_call)) throw;
    for (;;) pause();
  }
}

// Without the lock for as long as it lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    ask_for_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// With the lock for as long as it lives; any thread.
class GilTaken {
 public:
  GilTaken() : state_(ask_for_gil([] { return PyGILState_Ensure(); })) {}
  ~GilTaken() { PyGILState_Release(state_); }
  GilTaken(const GilTaken&) = delete;
  GilTaken& operator=(const GilTaken&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace moesaic::python
