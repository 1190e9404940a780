// The verbs of the tool, one file each.
#pragma once

#include "options.h"

namespace moesaic::tool {

Verb make_inspect(CLI::App& root);
Verb make_run(CLI::App& root);
Verb make_verify(CLI::App& root);
Verb make_explain(CLI::App& root);
Verb make_bench(CLI::App& root);
Verb make_env(CLI::App& root);
Verb make_demo(CLI::App& root);
Verb make_balance(CLI::App& root);
Verb make_accuracy(CLI::App& root);
Verb make_convert(CLI::App& root);

}  // namespace moesaic::tool
