#include "support/source_folder.h"

#include <cstdlib>

namespace moesaic::test {

std::string source_folder() {
  const char* const moved = std::getenv("MOESAIC_SOURCE_FOLDER");
  return moved != nullptr ? moved : MOESAIC_SOURCE_DIR;
}

std::string bundled_model(const std::string& name) {
  return source_folder() + "/testdata/models/" + name;
}

std::string extra_model(const std::string& name) {
  const char* const root = std::getenv("MOESAIC_EXTRA_MODELS");
  return (root != nullptr ? root : source_folder() + "/../shared/models") + "/" + name;
}

}  // namespace moesaic::test
