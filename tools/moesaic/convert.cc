// moesaic convert: a checkpoint with its routed experts in another number format.
#include "moesaic/convert.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <csignal>
#include <memory>

#include "verbs.h"

namespace moesaic::tool {
namespace {

struct ConvertArguments {
  CommonOptions common;
  std::string model, scheme, output;
  bool force = false;
};

// The signal that asked for the end; 0: none did.
std::atomic<int> interrupted{0};
extern "C" void on_signal(int number) { interrupted = number; }

// Ctrl-C, a closed terminal and kill end the conversion in order, so that its temporary folder goes
// away too. What was ignored at the start (nohup) stays ignored.
class SignalGuard {
 public:
  SignalGuard() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      old_[i] = std::signal(kSignals[i], on_signal);
      if (old_[i] == SIG_IGN) std::signal(kSignals[i], SIG_IGN);
    }
  }
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) std::signal(kSignals[i], old_[i]);
  }

 private:
  using Handler = void (*)(int);
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<Handler, 3> old_{};
};

void report(const Console& console, const ConvertArguments& state, const ConvertReport& result) {
  Json layers = Json::array();
  console.print(
      fmt::format("{:>5}  {:>14}  {:>9}  {:>9}\n", "layer", "rel_l2_weights", "in", "out"));
  for (const ConvertReport::Layer& l : result.layers) {
    layers.push_back({{"layer", l.layer},
                      {"rel_l2_weights", finite(l.rel_l2_weights)},
                      {"bytes_in", l.bytes_in},
                      {"bytes_out", l.bytes_out}});
    console.print(fmt::format("{:>5}  {:>14.4e}  {:>9}  {:>9}\n", l.layer, l.rel_l2_weights,
                              format_bytes(l.bytes_in), format_bytes(l.bytes_out)));
  }
  for (const std::string& note : result.notes) console.print("note: " + note + "\n");
  console.print(fmt::format("{}: {} instead of {}\n  next: moesaic verify --model {}\n",
                            state.output, format_bytes(result.bytes_out),
                            format_bytes(result.bytes_in), state.output));
  console.emit({{"model", state.model},
                {"output", state.output},
                {"quant", state.scheme},
                {"layers", std::move(layers)},
                {"bytes_in", result.bytes_in},
                {"bytes_out", result.bytes_out},
                {"notes", result.notes}});
}

int run_convert(const ConvertArguments& state) {
  const Console console = state.common.console();
  ConvertOptions options;
  options.scheme = state.scheme;
  options.num_threads = state.common.threads;
  options.progress = console.progress("converting");
  const SignalGuard guard;
  options.should_stop = [] { return interrupted.load() != 0; };
  options.replace_any_folder = state.force;
  bool output_failed = false;
  options.failed_on_output = &output_failed;
  const Result<ConvertReport> result = convert_checkpoint(state.model, state.output, options);
  console.finish_progress();
  if (!result.ok()) {
    const int signal = interrupted.load();
    if (signal != 0 && result.status().code() == StatusCode::kIo && !output_failed) {
      return console.fail_interrupted(result.status(), signal);
    }
    // What an output lacks is the folder to make it in: no name to choose from.
    const bool nowhere = output_failed && result.status().code() == StatusCode::kNotFound;
    return console.fail(result.status(), output_failed ? Origin::kOption : Origin::kFile,
                        nowhere ? "make that folder, or choose another place" : "");
  }
  report(console, state, *result);
  return kExitOk;
}

}  // namespace

Verb make_convert(CLI::App& root) {
  auto state = std::make_shared<ConvertArguments>();
  CLI::App* app = add_verb(
      root, "convert", "Write a checkpoint with the routed experts in another format",
      "  moesaic convert --model DIR --quant fp8-block --output DIR2\n"
      "  moesaic convert --model DIR --quant int4-g128 --output DIR2 --json\n"
      "\nEverything but the routed experts is copied as it is, linears in other formats too, and\n"
      "config.json describes both. DIR2 appears complete or not at all; it must be new, empty or\n"
      "a result of convert. The report has the relative L2 error of each layer's weights. Ctrl-C\n"
      "ends with 130 (kill 143, a closed terminal 129) and leaves nothing.\n");
  app->add_option("--model", state->model, "Folder with config.json and safetensors")->required();
  app->add_option("--output", state->output, "Folder to write: new, empty, or a result of convert")
      ->required();
  app->add_flag("--force", state->force, "Replace the folder --output whatever it holds");
  const auto schemes = convert_schemes();
  app->add_option("--quant", state->scheme, "Format of the routed experts")
      ->required()
      ->check(one_of({schemes.begin(), schemes.end()}));
  app->add_option("--threads", state->common.threads,
                  "Threads; 0 takes one per core. The result does not depend on it")
      ->check(whole_number(0, 4096))
      ->capture_default_str();
  add_output_options(*app, state->common);
  return {app, [state] { return run_convert(*state); }, /*computes=*/false};
}

}  // namespace moesaic::tool
