// What is wrong with a command line, in words that name the nearest option and the choices.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "moesaic/status.h"

namespace moesaic::tool {

struct UsageError {
  Status status;     // kInvalidArgument
  std::string next;  // "see 'moesaic run --help'"
};

// `root` has failed to parse argv with `error`. The parser reports what is missing before what it
// does not know; a person who misspelt --model wants to hear of that.
UsageError explain_usage(const CLI::App& root, const CLI::ParseError& error, int argc,
                         const char* const* argv);

}  // namespace moesaic::tool
