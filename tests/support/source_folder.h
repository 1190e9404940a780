// Where the tree's files are, for tests that read some.
#pragma once

#include <string>

namespace moesaic::test {

// The tree that was built; MOESAIC_SOURCE_FOLDER says where it was moved to.
std::string source_folder();

// A checkpoint of the tree, or a bigger one outside it: MOESAIC_EXTRA_MODELS names their folder,
// else they are looked for beside the tree.
std::string bundled_model(const std::string& name);
std::string extra_model(const std::string& name);

}  // namespace moesaic::test
