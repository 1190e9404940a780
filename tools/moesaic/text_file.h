// Small text files that people name on the command line: loads, times of other programs.
#pragma once

#include <string>

#include "moesaic/status.h"

namespace moesaic::tool {

// The whole file, which may be a pipe (`run --json | balance --load /dev/stdin`). kNotFound, kIo
// (a folder, a failure while reading), kLimitExceeded above 64 MB, so that /dev/zero ends.
Result<std::string> read_text(const std::string& path);

}  // namespace moesaic::tool
