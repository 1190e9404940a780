#include "options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "core/nearest_name.h"
#include "experts/cuda_general/general_experts.h"
#include "experts/sm90/experts.h"
#include "moesaic/device.h"
#include "moesaic/quant.h"

namespace moesaic::tool {
namespace {

// More threads than any machine has cores is a typing error, not a wish.
constexpr int kMaxThreads = 4096;

// Every scheme but as-is; several names may be as near.
Status no_such_scheme(const std::string& name) {
  std::vector<std::string_view> names = {"as-is"};
  for (const Scheme& scheme : quant_schemes()) names.push_back(scheme.name);
  std::vector<std::string_view> near;
  for (const std::string_view known : names) {
    if (!name_distance(name, known).unrelated) near.push_back(known);
  }
  if (near.empty()) near.push_back(nearest_name(name, names));
  return {
      StatusCode::kNotFound,
      fmt::format("--quant: got '{}', need one of {}; nearest {} {}", name.substr(0, 64),
                  fmt::join(names, ", "), near.size() == 1 ? "is" : "are", fmt::join(near, ", "))};
}

// The number that the whole text is, if it is written the one way that decimal numbers are.
template <class Number>
std::optional<Number> decimal(std::string_view text) {
  const std::string_view digits = text.substr(text.starts_with('-') ? 1 : 0);
  const bool padded = digits.size() > 1 && digits[0] == '0' && digits[1] != '.' && digits[1] != 'e';
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (padded || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The bounds as --help has them; those of the type itself say nothing.
template <class Number>
std::string range_text(Number low, Number high) {
  using Limits = std::numeric_limits<Number>;
  if (low == Limits::lowest() && high == Limits::max()) return "";
  return fmt::format("[{} - {}]", low, high);
}

template <class Number>
CLI::Validator in_range(const char* kind, Number low, Number high) {
  const auto check = [=](std::string& text) -> std::string {
    const std::optional<Number> value = decimal<Number>(text);
    if (value && *value >= low && *value <= high) return {};
    return fmt::format("got '{}', need {} from {} to {}", text, kind, low, high);
  };
  return {check, range_text(low, high)};
}

constexpr const char* kWhole = "a whole number";

std::vector<std::string> words_of(const std::string& list) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t comma = std::min(list.find(',', begin), list.size());
    words.push_back(list.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return words;
}

}  // namespace

template <class Int>
CLI::Validator whole_number(Int low, Int high) {
  return in_range(kWhole, low, high);
}
template CLI::Validator whole_number(int, int);
template CLI::Validator whole_number(std::int64_t, std::int64_t);
template CLI::Validator whole_number(std::uint64_t, std::uint64_t);

CLI::Validator number(double low, double high) { return in_range("a number", low, high); }

CLI::Validator whole_numbers(std::int64_t low, std::int64_t high) {
  const auto check = [=](std::string& list) -> std::string {
    for (const std::string& word : words_of(list)) {
      const std::optional<std::int64_t> value = decimal<std::int64_t>(word);
      if (value && *value >= low && *value <= high) continue;
      return fmt::format("got '{}' in '{}', need whole numbers from {} to {}, with commas between",
                         word, list, low, high);
    }
    return {};
  };
  return {check, range_text(low, high)};
}

std::vector<std::int64_t> numbers_of(const std::string& list) {
  std::vector<std::int64_t> numbers;
  for (const std::string& word : words_of(list)) {
    numbers.push_back(decimal<std::int64_t>(word).value_or(0));  // they have been checked
  }
  return numbers;
}

CLI::Validator not_empty() {
  return {[](std::string& text) -> std::string {
            return text.empty() ? "got '', need a value, or the option left out" : "";
          },
          ""};
}

CLI::App* add_verb(CLI::App& root, const std::string& name, const std::string& description,
                   const std::string& examples) {
  CLI::App* app = root.add_subcommand(name, description);
  app->footer(
      "\nExamples:\n" + examples +
      "\nExit codes: 0 ok, 1 verification failed, 2 usage, 3 bad input file, 4 unsupported,\n"
      "            5 device or memory, 6 internal.");
  return app;
}

CLI::Validator one_of(std::vector<std::string> names) {
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  const auto check = [names = std::move(names), list](std::string& value) -> std::string {
    if (std::find(names.begin(), names.end(), value) != names.end()) return {};
    const std::vector<std::string_view> views(names.begin(), names.end());
    return fmt::format("got '{}', need one of {}; nearest is '{}'", value, list,
                       nearest_name(value, views));
  };
  return {check, "{" + list + "}"};
}

void add_output_options(CLI::App& app, CommonOptions& options) {
  app.add_flag("--json", options.json,
               "Print one JSON object on stdout and nothing else; messages go to stderr");
  app.add_flag("-v,--verbose", options.verbosity, "Say more on stderr (repeat for even more)");
}

void add_seed_option(CLI::App& app, CommonOptions& options, const std::string& text) {
  app.add_option("--seed", options.seed, text)
      ->check(whole_number(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
}

void add_common_options(CLI::App& app, CommonOptions& options) {
  app.add_option("--device", options.device, "cpu or cuda[:N]; default: cuda if usable, else cpu")
      ->check(not_empty());
  app.add_option(
         "--threads", options.threads,
         "Threads at most; 0 takes one per core this process may use. Calls of microseconds "
         "run on one (explain shows which). The result does not depend on it")
      ->check(whole_number(0, kMaxThreads))
      ->capture_default_str();
  app.add_option(
         "--quant", options.quant,
         "Scheme to compute in: as-is (what the checkpoint holds) or a name such as f32, "
         "bf16, fp8-block, nvfp4, int4-g128; plain weights are quantised on loading, and integers "
         "of a checkpoint run with int8 activations as int4-g128-int8 or int8-g128-int8")
      ->capture_default_str();
  app.add_option("--backend", options.backend,
                 "Force one experts backend by its name in the catalogue (see explain)")
      ->check(not_empty());
  add_seed_option(app, options, "Seed of everything random");
  add_output_options(app, options);
}

void add_layer_options(CLI::App& app, CommonOptions& options) {
  const char* group = "Layer";
  app.add_option("--router-logits-dtype", options.router_logits_dtype,
                 "How the gate's fp32 sums are rounded before experts are chosen: another engine's "
                 "choice near ties is that of its own rounding")
      ->check(one_of({"f32", "bf16", "f16"}))
      ->capture_default_str()
      ->group(group);
  app.add_flag("--gate-fp32,!--no-gate-fp32", options.gate_fp32,
               "The gate's sums stay fp32 (default); --no-gate-fp32: they are rounded to the dtype "
               "of its weight first, as a linear of that dtype would")
      ->group(group);
  app.add_option("--activation-scales", options.activation_scales,
                 "Scales of activations that are quantised per group of 128: f32, or e8m0 (powers "
                 "of two); default: as the checkpoint says")
      ->check(one_of({"f32", "e8m0"}))
      ->group(group);
}

Status check_device_option(const CommonOptions& options, bool needs_device) {
  if (!options.device.empty()) {
    const Result<Device> device = parse_device(options.device);
    if (!device.ok()) {
      return {StatusCode::kInvalidArgument,
              fmt::format("--device: got '{}', need cpu or cuda[:N]", options.device)};
    }
    if (const Status usable = check_device(*device); needs_device && !usable.ok()) {
      return {StatusCode::kUnsupported, fmt::format("--device: {}; need cpu", usable.message())};
    }
  }
  return {};
}

Status check_common_options(const CommonOptions& options, bool needs_device) {
  MOESAIC_RETURN_IF_ERROR(check_device_option(options, needs_device));
  if (options.quant != "as-is" && !quant_scheme_from_name(options.quant).ok()) {
    return no_such_scheme(options.quant);
  }
  return {};
}

Device chosen_device(const CommonOptions& options) {
  if (!options.device.empty()) {
    const Result<Device> device = parse_device(options.device);
    return device.ok() ? *device : Device::cpu();
  }
  for (const CudaDeviceInfo& d : query_cuda().devices) {
    if (d.available) return Device::cuda(d.index);
  }
  return Device::cpu();
}

std::string slow_backend_note(std::string_view backend, std::span<const CandidateReport> rows) {
  if (backend != cuda::kGeneralExpertsName) return {};
  std::string reasons;
  for (const CandidateReport& row : rows) {
    if (row.stage != "experts" || row.accepted || row.name != cuda::kCudaExpertsName) continue;
    reasons = fmt::format(" ({}: {})", row.name, row.reason);
  }
  return fmt::format(
      "experts: {}, which takes everything and is slow beside a GPU's fast kernels{}; --device cpu "
      "computes the same there",
      backend, reasons);
}

std::string slow_backend_note(const FusedMoE& layer) {
  return slow_backend_note(layer.experts_backend(), layer.explain());
}

void tell_backend_note(const CommonOptions& options, const Console& console,
                       const std::string& note) {
  if (!note.empty() && options.device.empty() && options.backend.empty()) console.warn(note);
}

FusedMoE::Options layer_options(const CommonOptions& options, std::int64_t max_tokens) {
  FusedMoE::Options layer;
  layer.quant = options.quant;
  layer.backend = options.backend;
  layer.router_logits_dtype = options.router_logits_dtype == "bf16"  ? DType::kBF16
                              : options.router_logits_dtype == "f16" ? DType::kF16
                                                                     : DType::kF32;
  layer.gate_force_fp32_compute = options.gate_fp32;
  if (!options.activation_scales.empty()) {
    layer.activation_scales =
        options.activation_scales == "e8m0" ? ScaleFormat::kE8M0 : ScaleFormat::kF32;
  }
  layer.device = chosen_device(options);
  layer.num_threads = options.threads;
  layer.max_tokens = max_tokens;
  return layer;
}

}  // namespace moesaic::tool
