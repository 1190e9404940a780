#include "checkpoint/generated_files.h"

#include <cstdlib>
#include <fstream>

namespace moesaic::test {

GeneratedFiles generate_files(const std::string& python, const std::string& script,
                              const TempDir& folder) {
  GeneratedFiles files;
  // Tests may be carried to another machine with the scripts.
  const char* const moved = std::getenv("MOESAIC_SOURCE_FOLDER");
  const std::string tree = moved != nullptr ? moved : MOESAIC_SOURCE_DIR;
  const std::string command = "P='" + python +
                              "'; [ -x \"$P\" ] || P=python3; PYTHONDONTWRITEBYTECODE=1 \"$P\" '" +
                              tree + "/tests/checkpoint/" + script + "' '" + folder.path() +
                              "' > '" + folder.path("log") + "' 2>&1";
  if (std::system(command.c_str()) != 0) {
    files.problem = script + ": " + read_bytes(folder.path("log"));
    return files;
  }
  std::ifstream in(folder.path("manifest.json"));
  files.manifest = nlohmann::json::parse(in);
  return files;
}

}  // namespace moesaic::test
