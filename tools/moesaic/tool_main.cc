#include "tool_main.h"

#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/container/names.h"
#include "cpu/tiers.h"
#include "moesaic/log.h"
#include "result_file.h"
#include "usage.h"
#include "verbs.h"
#include "version.h"

namespace moesaic::tool {
namespace {

constexpr const char* kAbout =
    "Runs the mixture-of-experts layer of language models: what was asked within a stated error "
    "bound, or a refusal with the reason.";

constexpr const char* kFooter =
    "\nStart here:\n"
    "  moesaic inspect DIR            what is in a checkpoint\n"
    "  moesaic verify --model DIR     is the result right? (needs DIR/golden.safetensors)\n"
    "  moesaic explain --model DIR    which backend would run, and why not the others\n"
    "  moesaic VERB --help            options and examples of one verb\n";

// Also of a command line that cannot be parsed; "--json=true" as the parser reads flags.
bool wants_json(int argc, char** argv) {
  constexpr std::string_view kJson = "--json";
  bool wanted = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == kJson) wanted = true;
    if (!word.starts_with("--json=")) continue;
    try {
      wanted = CLI::detail::to_flag_value(std::string(word.substr(kJson.size() + 1))) > 0;
    } catch (const std::invalid_argument&) {
      wanted = true;  // of an error in this very option
    }
  }
  return wanted;
}

// Where a failure is reported that comes before the options are known: not into a result that was to
// go to stdout.
std::FILE* reports_to(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    for (const std::string_view option : {"--output", "--plot"}) {
      const std::string_view word = argv[i];
      if (!word.starts_with(option)) continue;
      ResultFile file;
      if (word.size() == option.size() && i + 1 < argc) file.path = argv[i + 1];
      if (word.substr(option.size()).starts_with('=')) file.path = word.substr(option.size() + 1);
      if (!file.path.empty() && goes_to_stdout(file)) return stderr;
    }
  }
  return stdout;
}

int run_verb(int argc, char** argv) {
  CLI::App root(kAbout, "moesaic");
  root.footer(kFooter);
  root.set_version_flag("--version", version_text());
  root.require_subcommand(1);
  root.get_formatter()->column_width(34);
  const std::vector<Verb> verbs = {make_inspect(root), make_run(root),     make_verify(root),
                                   make_explain(root), make_bench(root),   make_demo(root),
                                   make_env(root),     make_convert(root), make_balance(root),
                                   make_accuracy(root)};
  try {
    root.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    return root.exit(request);
  } catch (const CLI::ParseError& error) {
    const UsageError usage = explain_usage(root, error, argc, argv);
    return Console(wants_json(argc, argv), 0, /*results=*/true, reports_to(argc, argv))
        .fail(usage.status, Origin::kOption, usage.next);
  }
  for (const Verb& verb : verbs) {
    if (!verb.app->parsed()) continue;
    // Not an option and not the file's fault, whatever the verb finds out first.
    const Status tier = verb.computes ? cpu::current_kernels().status() : Status();
    if (tier.ok()) return verb.run();
    return Console(wants_json(argc, argv), 0, /*results=*/true, reports_to(argc, argv))
        .fail(tier, Origin::kOption, "correct or unset MOESAIC_CPU_TIER");
  }
  return kExitInternal;
}

}  // namespace

int tool_main(int argc, char** argv) {
  // A file above the limit of its size (ulimit -f) is an error like a full disk, which leaves
  // nothing behind, and not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  const Console console(wants_json(argc, argv), 0, /*results=*/true, reports_to(argc, argv));
  int code = kExitInternal;
  try {
    set_log_sink([](std::string_view message) {
      std::fputs(fmt::format("{}: warning: {}\n", log_name(), checkpoint::escape_controls(message))
                     .c_str(),
                 stderr);
    });
    code = run_verb(argc, argv);
  } catch (const std::bad_alloc&) {
    code = console.fail({StatusCode::kOutOfMemory, "the allocator refused"}, Origin::kOption);
  } catch (const std::exception& error) {
    code = console.fail({StatusCode::kInternal, error.what()}, Origin::kOption);
  }
  // A full disk behind stdout must not look like success.
  if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && code == kExitOk) {
    // Nothing more can be said there.
    code = Console(/*json=*/false, 0)
               .fail({StatusCode::kIo, "stdout could not be written"}, Origin::kStdout);
  }
  return code;
}

}  // namespace moesaic::tool
