// The exit codes of the tool, and the one place that maps the library's StatusCode to them.
#pragma once

#include "moesaic/status.h"

namespace moesaic::tool {

enum ExitCode : int {
  kExitOk = 0,
  kExitVerifyFailed = 1,  // the layer ran, its result is outside the bound
  kExitUsage = 2,         // a verb, option or value that the command line does not take
  kExitBadInput = 3,      // a file that is missing, damaged or not what it should be
  kExitUnsupported = 4,   // understood, but not in this build or by this backend
  kExitDevice = 5,        // device, communicator or memory trouble
  kExitInternal = 6,      // a bug
};

// Plus a signal's number, as shells report it: work that SIGINT, SIGTERM or SIGHUP ended in order.
inline constexpr int kExitInterrupted = 128;

// Where the value that failed came from: the same "not found" is bad input for a file and a usage
// error for the name of a backend. What stdout refuses is neither.
enum class Origin { kFile, kOption, kStdout };

ExitCode exit_code(StatusCode code, Origin origin);

// One sentence that tells what to do next about such a failure.
const char* next_step(StatusCode code, Origin origin);

}  // namespace moesaic::tool
