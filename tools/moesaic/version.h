// Which version, commit and compiler this binary was built from, and what processor it runs on.
#pragma once

#include <string>

namespace moesaic::tool {

const char* version();  // "0.1.0"
const char*
commit();  // short hash, "-dirty" appended when files were changed; empty outside a checkout
std::string compiler();        // "g++ 12.2.0"
std::string build_type();      // "Release"
std::string cpu_model_name();  // as the operating system states it, or "unknown"
std::string version_text();    // all of them in a line

}  // namespace moesaic::tool
