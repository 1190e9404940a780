// Options that several verbs share, and how a verb joins the command line.
//
// A verb is one file with one function `Verb make_<name>(CLI::App& root)`: it adds a subcommand
// with add_verb, binds its options to a state held by shared_ptr, and returns what is to be run
// after parsing. main.cc lists the verbs. Values that CLI11 can check (ranges, choices) are checked
// while parsing and end with exit code 2; everything else returns through Console::fail.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint/container/names.h"
#include "console.h"
#include "moesaic/device.h"
#include "moesaic/fused_moe.h"
#include "moesaic/status.h"

namespace moesaic::tool {

struct CommonOptions {
  std::string device;  // empty: the default, which is the CPU in a build without CUDA
  int threads = 0;     // 0: one per core this process may use
  std::string quant = "as-is";
  std::string backend;
  // What a verb that makes a layer may say about it (add_layer_options).
  std::string router_logits_dtype = "f32";
  bool gate_fp32 = true;
  std::string activation_scales;  // empty: as the checkpoint says
  std::uint64_t seed = 1;
  bool json = false;
  int verbosity = 0;
  bool report_on_stderr = false;  // the result itself goes to stdout

  Console console(bool results = true) const {
    return {json, verbosity, results, report_on_stderr ? stderr : stdout};
  }
};

struct Verb {
  CLI::App* app = nullptr;
  std::function<int()> run;
  bool computes = true;  // with the kernels of a CPU tier, or tells of that
};

// A subcommand with its examples at the end of --help.
CLI::App* add_verb(CLI::App& root, const std::string& name, const std::string& description,
                   const std::string& examples);
// A whole number, or a number, within bounds, written in decimal without leading zeros; nothing that
// is not one passes, NaN included.
template <class Int>
CLI::Validator whole_number(Int low, Int high);
CLI::Validator number(double low, double high);
// Such whole numbers separated by commas, and what they are.
CLI::Validator whole_numbers(std::int64_t low, std::int64_t high);
std::vector<std::int64_t> numbers_of(const std::string& list);
// Anything but the empty string, which would count as no option at all.
CLI::Validator not_empty();

// A choice among names; any other value is refused with all of them and the nearest.
CLI::Validator one_of(std::vector<std::string> names);

// --json and -v.
void add_output_options(CLI::App& app, CommonOptions& options);
// --seed.
void add_seed_option(CLI::App& app, CommonOptions& options, const std::string& text);
// --device, --threads, --quant, --backend, --seed, --json and -v.
void add_common_options(CLI::App& app, CommonOptions& options);

// --layer; an int or an optional one.
template <class Number>
CLI::Option* add_layer_number(CLI::App& app, Number& layer, const std::string& text) {
  using Limits = std::numeric_limits<int>;
  return app.add_option("--layer", layer, text)
      ->check(whole_number(Limits::lowest(), Limits::max()));
}

// --router-logits-dtype, --gate-fp32 and --activation-scales, of verbs that make a whole layer.
void add_layer_options(CLI::App& app, CommonOptions& options);

// Checks what CLI11 could not: the device can be used (or, without needs_device, is at least a
// name), the scheme is known. The returned Status is about an option.
Status check_common_options(const CommonOptions& options, bool needs_device = true);
// The first half of that.
Status check_device_option(const CommonOptions& options, bool needs_device = true);

// The device that the options name; without a name the first GPU when one can be used, else the
// CPU.
Device chosen_device(const CommonOptions& options);

// A word about a GPU's kernel that takes everything, where `backend` is that: slow beside the fast
// ones, and why they refused. Empty for other backends.
std::string slow_backend_note(std::string_view backend, std::span<const CandidateReport> rows);
std::string slow_backend_note(const FusedMoE& layer);
// Such a word on stderr, where nobody named the device or the backend that it is about.
void tell_backend_note(const CommonOptions& options, const Console& console,
                       const std::string& note);

// The part of the library's options that the command line states.
FusedMoE::Options layer_options(const CommonOptions& options, std::int64_t max_tokens);

// make(options) on the chosen device. When nobody named it, a GPU was chosen and it refuses the
// layer as unsupported, says so on stderr and makes it on the CPU; options.device tells where.
template <class Make>
auto on_chosen_device(const CommonOptions& common, const Console& console,
                      FusedMoE::Options& options, Make make) {
  auto made = make(options);
  if (made.ok() || made.status().code() != StatusCode::kUnsupported || !common.device.empty() ||
      !options.device.is_cuda()) {
    return made;
  }
  console.warn(options.device.to_string() + ": " +
               checkpoint::escape_controls(made.status().message()) +
               "\n  next: using the CPU; name --device to choose");
  options.device = Device::cpu();
  return make(options);
}

}  // namespace moesaic::tool
