// moesaic convert: a checkpoint with its routed experts in another number format.
#include "moesaic/convert.h"

#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <memory>

#include "verbs.h"

namespace moesaic::tool {
namespace {

struct ConvertArguments {
  CommonOptions common;
  std::string model, scheme, output;
};

std::atomic<bool> interrupted{false};
extern "C" void on_signal(int) { interrupted = true; }

// Ctrl-C ends the conversion in order, so that its temporary folder goes away too.
class SignalGuard {
 public:
  SignalGuard()
      : old_int_(std::signal(SIGINT, on_signal)), old_term_(std::signal(SIGTERM, on_signal)) {}
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard() {
    std::signal(SIGINT, old_int_);
    std::signal(SIGTERM, old_term_);
  }

 private:
  using Handler = void (*)(int);
  Handler old_int_, old_term_;
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
  options.should_stop = [] { return interrupted.load(); };
  const Result<ConvertReport> result = convert_checkpoint(state.model, state.output, options);
  console.finish_progress();
  if (!result.ok()) {
    const StatusCode code = result.status().code();
    const bool option = code == StatusCode::kUnsupported || code == StatusCode::kInvalidArgument;
    return console.fail(result.status(), option ? Origin::kOption : Origin::kFile);
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
      "\nEverything but the routed experts is copied as it is. DIR2 appears complete or not at "
      "all;\n"
      "it must be new or empty. The report has the relative L2 error of each layer's weights.\n");
  app->add_option("--model", state->model, "Folder with config.json and safetensors")->required();
  app->add_option("--output", state->output, "Folder to write: new, or empty")->required();
  const auto schemes = convert_schemes();
  app->add_option("--quant", state->scheme, "Format of the routed experts")
      ->required()
      ->check(CLI::IsMember(std::vector<std::string>(schemes.begin(), schemes.end())));
  app->add_option("--threads", state->common.threads,
                  "Threads; 0 takes one per core. The result does not depend on it")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  add_output_options(*app, state->common);
  return {app, [state] { return run_convert(*state); }};
}

}  // namespace moesaic::tool
