// Files that a Python script of this folder writes for a test, independently of the library.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/container_support.h"

namespace moesaic::test {

// Runs `python tests/checkpoint/<script> <folder>`. Scripts take seconds: where the environment has
// MOESAIC_GENERATED_FILES, a folder, what one process has written is kept there and others copy it.
struct GeneratedFiles {
  nlohmann::json manifest;  // <folder>/manifest.json
  std::string problem;      // what the script said when it failed; empty: all is well
};
GeneratedFiles generate_files(const std::string& python, const std::string& script,
                              const TempDir& folder);

}  // namespace moesaic::test
