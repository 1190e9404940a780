#include "checkpoint/generated_files.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "support/source_folder.h"

namespace moesaic::test {
namespace {

namespace fs = std::filesystem;

// Where the files of `script` are kept; empty: nowhere.
fs::path kept_files(const std::string& script) {
  const char* const kept = std::getenv("MOESAIC_GENERATED_FILES");
  return kept == nullptr || *kept == '\0' ? fs::path() : fs::path(kept) / script;
}

bool copy_files(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::copy(from, to, fs::copy_options::recursive | fs::copy_options::overwrite_existing, error);
  return !error;
}

// All of them or none: another process may be about to do the same.
void keep_files(const fs::path& from, const fs::path& to) {
  const fs::path here = to.string() + "." + std::to_string(getpid());
  std::error_code error;
  if (copy_files(from, here)) fs::rename(here, to, error);
  fs::remove_all(here, error);
}

}  // namespace

GeneratedFiles generate_files(const std::string& python, const std::string& script,
                              const TempDir& folder) {
  GeneratedFiles files;
  const auto read_manifest = [&] {
    std::ifstream in(folder.path("manifest.json"));
    files.manifest = nlohmann::json::parse(in);
    return files;
  };
  const fs::path kept = kept_files(script);
  if (!kept.empty() && fs::exists(kept) && copy_files(kept, folder.path())) return read_manifest();
  const std::string command = "P='" + python +
                              "'; [ -x \"$P\" ] || P=python3; PYTHONDONTWRITEBYTECODE=1 \"$P\" '" +
                              source_folder() + "/tests/checkpoint/" + script + "' '" +
                              folder.path() + "' > '" + folder.path("log") + "' 2>&1";
  if (std::system(command.c_str()) != 0) {
    files.problem = script + ": " + read_bytes(folder.path("log"));
    return files;
  }
  if (!kept.empty()) keep_files(folder.path(), kept);
  return read_manifest();
}

}  // namespace moesaic::test
