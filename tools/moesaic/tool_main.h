// moesaic VERB [options]: parses the command line, runs one verb, turns everything that can go
// wrong into an exit code. The executable and the Python package's console script both call it.
#pragma once

namespace moesaic::tool {

int tool_main(int argc, char** argv);

}  // namespace moesaic::tool
