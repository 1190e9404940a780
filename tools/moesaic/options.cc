#include "options.h"

#include <fmt/format.h>

#include <algorithm>
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

}  // namespace

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

void add_common_options(CLI::App& app, CommonOptions& options) {
  app.add_option("--device", options.device, "cpu or cuda[:N]; default: cuda if usable, else cpu");
  app.add_option(
         "--threads", options.threads,
         "Threads at most; 0 takes one per core this process may use. Calls of microseconds "
         "run on one (explain shows which). The result does not depend on it")
      ->check(CLI::Range(0, kMaxThreads))
      ->capture_default_str();
  app.add_option(
         "--quant", options.quant,
         "Scheme to compute in: as-is (what the checkpoint holds) or a name such as f32, "
         "bf16, fp8-block, nvfp4, int4-g128; plain weights are quantised on loading, and integers "
         "of a checkpoint run with int8 activations as int4-g128-int8 or int8-g128-int8")
      ->capture_default_str();
  app.add_option("--backend", options.backend,
                 "Force one experts backend by its name in the catalogue (see explain)");
  app.add_option("--seed", options.seed, "Seed of everything random")->capture_default_str();
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
