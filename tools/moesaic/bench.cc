// moesaic bench: a correctness check, then time, per number of tokens; every figure beside the
// floor that this machine allows, measured in the same process.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "bench_random.h"
#include "bench_stages.h"
#include "ceilings.h"
#include "cpu/tiers.h"
#include "layer_io.h"
#include "shapes.h"
#include "verbs.h"
#include "version.h"

namespace moesaic::tool {
namespace {

struct State {
  CommonOptions common;
  std::string model, shape;
  int layer = -1;
  std::vector<std::int64_t> tokens = {1, 4, 16, 64, 512};
  std::string stage = "experts";
  std::string routing = "uniform";
  double seconds = 1.0;
};

struct Samples {
  std::vector<double> us;
  double median() const { return us[us.size() / 2]; }
};

constexpr std::size_t kMinSamples = 5;

// A sample is one pass over all rotations, per run. Sorted on return.
Result<Samples> measure(const BenchPoint& point, double seconds) {
  using Clock = std::chrono::steady_clock;
  Samples samples;
  const auto pass = [&]() -> Result<double> {
    const auto begin = Clock::now();
    for (int i = 0; i < point.rotations; ++i) MOESAIC_RETURN_IF_ERROR(point.run(i));
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() /
           point.rotations;
  };
  MOESAIC_ASSIGN_OR_RETURN(const double warm, pass());
  static_cast<void>(warm);
  const auto begin = Clock::now();
  while (samples.us.size() < kMinSamples ||
         std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    MOESAIC_ASSIGN_OR_RETURN(const double us, pass());
    samples.us.push_back(us);
  }
  std::sort(samples.us.begin(), samples.us.end());
  return samples;
}

Result<BenchSettings> settings_of(const State& state, std::optional<Checkpoint>& checkpoint,
                                  Origin& origin) {
  BenchSettings s;
  MOESAIC_RETURN_IF_ERROR(check_routing_name(state.routing));
  s.seed = state.common.seed;
  s.routing = state.routing;
  s.options =
      layer_options(state.common, *std::max_element(state.tokens.begin(), state.tokens.end()));
  origin = Origin::kOption;
  if (!state.shape.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(s.spec, layer_from_shape(state.shape));
    if (state.common.quant != "as-is") {
      MOESAIC_ASSIGN_OR_RETURN(s.spec.quant, quant_scheme_from_name(state.common.quant));
      s.options.quant = "as-is";  // random weights are drawn in the scheme's own format
    }
    if (s.spec.quant.activation.dtype == DType::kF32 ||
        s.spec.quant.activation.dtype == DType::kF16) {
      s.spec.activation_dtype = s.spec.quant.activation.dtype;
    }
    return s;
  }
  origin = Origin::kFile;
  MOESAIC_ASSIGN_OR_RETURN(checkpoint, Checkpoint::open(state.model));
  if (checkpoint->layers().empty())
    return Status(StatusCode::kNotFound, state.model + ": has no MoE layers");
  origin = Origin::kOption;
  MOESAIC_ASSIGN_OR_RETURN(
      s.spec,
      checkpoint->layer(state.layer >= 0 ? state.layer : checkpoint->layers().front().layer));
  if (state.common.quant != "as-is" && state.common.quant != s.spec.quant.name &&
      state.stage == "experts") {
    return Status(
        StatusCode::kUnsupported,
        fmt::format(
            "--quant {}: the experts stage of a checkpoint runs as stored ({}); use --stage layer",
            state.common.quant, s.spec.quant.name));
  }
  s.checkpoint = &*checkpoint;
  return s;
}

int run_bench(const State& state) {
  const Console console = state.common.console();
  if (const Status status = check_common_options(state.common); !status.ok()) {
    return console.fail(status, Origin::kOption);
  }
  std::optional<Checkpoint> checkpoint;
  Origin origin = Origin::kOption;
  Result<BenchSettings> settings = settings_of(state, checkpoint, origin);
  if (!settings.ok()) return console.fail(settings.status(), origin);
  // Before the weights are there: the buffer that is read for the ceiling must not add to the peak
  // memory.
  console.note(1, "measuring this machine's read bandwidth and arithmetic peak");
  const Ceilings ceilings = narrow_arithmetic(state.stage, *settings)
                                ? measure_ceilings(state.common.threads)
                                : measure_ceilings_f32(state.common.threads);
  settings->options.progress = console.progress("loading");
  Result<std::unique_ptr<BenchStage>> stage = make_bench_stage(state.stage, *settings);
  console.finish_progress();
  if (!stage.ok()) return console.fail(stage.status(), Origin::kOption);

  const std::string name = state.shape.empty() ? state.model : state.shape;
  console.print(
      fmt::format("{} {} {}, {} routing; machine: read {:.1f} GB/s, multiply {:.0f} GFLOP/s ({})\n",
                  name, state.stage, (*stage)->quant(), state.routing, ceilings.read_gbps,
                  ceilings.gflops, cpu_model_name()));
  console.print(fmt::format("{:>8} {:>12} {:>12} {:>9} {:>9} {:>12} {:>7} {:>10}  {}\n", "tokens",
                            "median us", "min us", "GB/s", "GFLOP/s", "floor us", "floor", "rel_l2",
                            "backend"));
  for (const std::int64_t tokens : state.tokens) {
    const Result<BenchPoint> point = (*stage)->prepare(tokens);
    if (!point.ok()) return console.fail(point.status(), Origin::kOption);
    const Result<Samples> samples = measure(*point, state.seconds);
    if (!samples.ok()) return console.fail(samples.status(), Origin::kOption);
    const double us = samples->median();
    const double floor =
        std::max(point->bytes / (ceilings.read_gbps * 1e3), point->flops / (ceilings.gflops * 1e3));
    console.emit({{"shape", name},
                  {"stage", state.stage},
                  {"tokens", tokens},
                  {"device", "cpu"},
                  {"backend", (*stage)->backend()},
                  {"quant", (*stage)->quant()},
                  {"routing", state.routing},
                  {"median_us", us},
                  {"min_us", samples->us.front()},
                  {"max_us", samples->us.back()},
                  {"samples", samples->us.size()},
                  {"bytes", point->bytes},
                  {"flops", point->flops},
                  {"gbps", point->bytes / us * 1e-3},
                  {"tflops", point->flops / us * 1e-6},
                  {"floor_us", finite(floor)},
                  {"floor_pct", finite(100 * floor / us)},
                  {"ceilings", {{"read_gbps", ceilings.read_gbps}, {"gflops", ceilings.gflops}}},
                  {"rel_l2", finite(point->rel_l2)},
                  {"bound", point->bound},
                  {"threads", cpu::resolve_threads(state.common.threads)},
                  {"commit", commit()},
                  {"compiler", compiler()},
                  {"machine", cpu_model_name()}});
    console.print(fmt::format(
        "{:>8} {:>12.1f} {:>12.1f} {:>9.1f} {:>9.1f} {:>12.1f} {:>6.0f}% {:>10.1e}  {}\n", tokens,
        us, samples->us.front(), point->bytes / us * 1e-3, point->flops / us * 1e-3, floor,
        100 * floor / us, point->rel_l2, (*stage)->backend()));
  }
  return kExitOk;
}

}  // namespace

Verb make_bench(CLI::App& root) {
  auto state = std::make_shared<State>();
  std::string names;
  for (const std::string_view name : shape_names()) names += fmt::format(" {}", name);
  CLI::App* app = add_verb(
      root, "bench", "Check a stage's result, then time it against what this machine allows",
      "  moesaic bench --shape qwen3-30b --tokens 1,16,512\n"
      "  moesaic bench --shape qwen3-30b --quant fp8-block --json\n"
      "  moesaic bench --model testdata/models/mini-deepseek-v3 --stage layer\n"
      "  moesaic bench --shape 64,8,2048,1024 --routing zipf:1.0 --threads 2\n"
      "\nfloor us = max(bytes that must move / measured read bandwidth, operations / measured "
      "multiply-add peak)\n\nShapes:" +
          names + "\n");
  CLI::Option_group* source = app->add_option_group("layer", "The layer to time: one of");
  source->add_option("--model", state->model, "Folder with config.json and safetensors, or a GGUF file");
  source->add_option("--shape", state->shape,
                     "Shape name, or E,k,H,I[,activation]; weights drawn from --seed");
  source->require_option(1);
  app->add_option("--layer", state->layer, "Layer of --model; default: the first MoE layer")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--tokens", state->tokens, "Numbers of tokens, one point each")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  app->add_option("--stage", state->stage, "What to time")
      ->check(CLI::IsMember({"gate", "route", "experts", "layer"}))
      ->capture_default_str();
  app->add_option("--routing", state->routing, "uniform, zipf:S or one")->capture_default_str();
  app->add_option("--seconds", state->seconds, "Time to spend on each point, at least")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  add_common_options(*app, state->common);
  return {app, [state] { return run_bench(*state); }};
}

}  // namespace moesaic::tool
