// moesaic bench: a correctness check, then time, per number of tokens; every figure beside the
// floor that this machine allows, measured in the same process.
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "bench_plot.h"
#include "bench_random.h"
#include "bench_ranks.h"
#include "bench_stages.h"
#include "ceilings.h"
#include "core/fault.h"
#include "cpu/tiers.h"
#include "layer_io.h"
#include "result_file.h"
#include "shapes.h"
#include "verbs.h"
#include "version.h"

namespace moesaic::tool {
namespace {

struct BenchArguments {
  CommonOptions common;
  RankOptions ranks;
  std::string model, shape;
  std::optional<int> layer;  // the first MoE layer
  std::vector<std::int64_t> tokens = {1, 4, 16, 64, 512};
  std::string stage = "experts";
  std::string routing = "uniform";
  std::string door = kDoors.front();
  double seconds = 1.0;
  std::string plot, peers;
  bool force = false;

  ResultFile plot_file() const {
    return {"--plot", plot, ResultFile::Content::kPlot, force, model, {peers}};
  }
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
  if (point.time) {
    MOESAIC_ASSIGN_OR_RETURN(samples.us, point.time(seconds));
    std::sort(samples.us.begin(), samples.us.end());
    return samples;
  }
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

// Random weights may have schemes that are known from checkpoints only.
Result<Scheme> bench_scheme(std::string_view name) {
  for (const Scheme& scheme : stored_schemes()) {
    if (scheme.name == name) return scheme;
  }
  return quant_scheme_from_name(name);
}
std::string stored_scheme_names() {
  std::vector<std::string_view> names;
  for (const Scheme& scheme : stored_schemes()) names.push_back(scheme.name);
  return fmt::format("{}", fmt::join(names, " "));
}

Result<BenchSettings> settings_of(const BenchArguments& state,
                                  std::optional<Checkpoint>& checkpoint, Origin& origin) {
  BenchSettings s;
  MOESAIC_RETURN_IF_ERROR(check_routing_name(state.routing));
  s.seed = state.common.seed;
  s.routing = state.routing;
  s.door = state.door;
  s.options =
      layer_options(state.common, *std::max_element(state.tokens.begin(), state.tokens.end()));
  origin = Origin::kOption;
  if (!state.shape.empty()) {
    if (state.layer) return layer_beside_shape(*state.layer);
    MOESAIC_ASSIGN_OR_RETURN(s.spec, layer_from_shape(state.shape));
    if (state.common.quant != "as-is") {
      MOESAIC_ASSIGN_OR_RETURN(s.spec.quant, bench_scheme(state.common.quant));
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
  const int layer = state.layer.value_or(checkpoint->layers().front().layer);
  MOESAIC_ASSIGN_OR_RETURN(s.spec, checkpoint->layer(layer));
  origin = Origin::kFile;
  MOESAIC_ASSIGN_OR_RETURN(const MoeLayerFormat format, checkpoint->check_layer(layer));
  s.spec = format.spec;
  origin = Origin::kOption;
  if (state.common.quant != "as-is" && state.common.quant != s.spec.quant.name &&
      (state.stage == "experts" || state.stage == "kernel")) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format(
            "--quant {}: the {} stage of a checkpoint runs as stored ({}); use --stage layer",
            state.common.quant, state.stage, s.spec.quant.name));
  }
  s.checkpoint = &*checkpoint;
  return s;
}

// The layer's stage on the chosen device, with the ceilings of that device. The ceilings come
// first: the buffer that is read for them must not add to the peak memory.
struct Prepared {
  Ceilings ceilings;
  std::unique_ptr<BenchStage> stage;
};
Result<Prepared> prepare_stage(const BenchArguments& state, const BenchSettings& settings) {
  Prepared p;
  MOESAIC_ASSIGN_OR_RETURN(p.ceilings, stage_ceilings(state.stage, settings, state.common.threads));
  MOESAIC_ASSIGN_OR_RETURN(p.stage, make_bench_stage(state.stage, settings));
  return p;
}

// What every point is reported with.
struct Context {
  std::string name, device, machine, quant, backend, backend_note;
  Ceilings ceilings;
};
std::string device_name(Device device) {
  return device.is_cuda() ? gpu_name(device) : cpu_model_name();
}

Json point_json(const BenchArguments& state, const Context& c, std::int64_t tokens,
                const BenchPoint& point, const Samples& samples, double floor, double peer) {
  const double us = samples.median();
  Json json = {{"shape", c.name},
               {"stage", state.stage},
               {"tokens", tokens},
               {"device", c.device},
               {"backend", c.backend},
               {"backend_note", c.backend_note},
               {"quant", c.quant},
               {"routing", state.routing},
               {"median_us", us},
               {"min_us", samples.us.front()},
               {"max_us", samples.us.back()},
               {"samples", samples.us.size()},
               {"bytes", point.bytes},
               {"flops", point.flops},
               {"gbps", point.bytes / us * 1e-3},
               {"tflops", point.flops / us * 1e-6},
               {"floor_us", finite(floor)},
               {"floor_pct", finite(100 * floor / us)},
               {"ceilings", {{"read_gbps", c.ceilings.read_gbps}, {"gflops", c.ceilings.gflops}}},
               {"rel_l2", finite(point.rel_l2)},
               {"bound", finite(point.bound)},
               {"threads", cpu::resolve_threads(state.common.threads)},
               {"commit", commit()},
               {"compiler", compiler()},
               {"machine", c.machine}};
  if (state.stage == "layer") json["door"] = state.door;
  if (peer > 0) json["peer_us"] = peer;
  return json;
}

// An option that a stage has no use for. (--quant and --routing are for all of them: a script that goes
// through the stages says the same of each.)
Status check_stage_options(const BenchArguments& state) {
  const BenchArguments usual;
  const bool layer = state.stage == "layer";
  const bool experts = state.stage != "gate" && state.stage != "route";
  struct Option {
    std::string_view name, value;
    bool unused;
    std::string_view need;
  };
  for (const Option& o :
       {Option{"--door", state.door, !layer && state.door != usual.door, "layer"},
        Option{"--backend", state.common.backend, !experts && !state.common.backend.empty(),
               "a stage with experts"},
        Option{"--peers", state.peers, !experts && !state.peers.empty(), "a stage with experts"}}) {
    if (!o.unused || MOESAIC_FAULT(bench_ignores_options_of_other_stages)) continue;
    return {StatusCode::kUnsupported,
            fmt::format("{} {}: got --stage {}, need {}", o.name, o.value, state.stage, o.need)};
  }
  return {};
}

int run_bench(BenchArguments state) {
  const bool plots = !state.plot.empty();
  const ResultFile plot = state.plot_file();
  state.common.report_on_stderr = plots && goes_to_stdout(plot);
  const Console console = state.common.console();
  const bool stored = !state.shape.empty() && bench_scheme(state.common.quant).ok();
  const Status usable =
      stored ? check_device_option(state.common) : check_common_options(state.common);
  if (usable.code() == StatusCode::kNotFound && !state.shape.empty()) {
    const std::string more = "; random weights may also have " + stored_scheme_names();
    return console.fail({usable.code(), usable.message() + more}, Origin::kOption);
  }
  if (!usable.ok()) return console.fail(usable, Origin::kOption);
  if (const Status alone = check_rank_options(state.ranks); !alone.ok()) {
    return console.fail(alone, Origin::kOption);
  }
  // Also of what draws weights and checks results.
  if (state.common.threads > 0) omp_set_num_threads(state.common.threads);
  if (const Status stage = check_stage_options(state); !stage.ok()) {
    return console.fail(stage, Origin::kOption, "leave it out, or choose another --stage");
  }
  if (wants_ranks(state.ranks)) {
    if (state.stage != "layer") {
      return console.fail({StatusCode::kUnsupported,
                           fmt::format("--stage: got {} over ranks, need layer", state.stage)},
                          Origin::kOption, "add --stage layer");
    }
    if (plots || !state.peers.empty()) {
      return console.fail(
          {StatusCode::kUnsupported,
           fmt::format("{}: got one over ranks, need one rank", plots ? "--plot" : "--peers")},
          Origin::kOption, "leave it out; --json has the points");
    }
    const BenchRanksRequest request{
        state.shape.empty() ? state.model : state.shape, state.routing, state.tokens, state.seconds,
        [&state](std::optional<Checkpoint>& c, Origin& o) { return settings_of(state, c, o); }};
    return run_on_ranks(state.ranks, state.common,
                        [&](const RankContext& c) { return bench_on_rank(request, c); });
  }
  std::optional<Checkpoint> checkpoint;
  Origin origin = Origin::kOption;
  Result<BenchSettings> settings = settings_of(state, checkpoint, origin);
  if (!settings.ok()) return console.fail(settings.status(), origin);
  std::vector<PlotSeries> peers;
  if (!state.peers.empty()) {
    const std::string_view quant =
        state.common.quant == "as-is" ? settings->spec.quant.name : state.common.quant;
    Result<std::vector<PlotSeries>> read = read_peers(state.peers, settings->spec, quant);
    if (!read.ok()) return console.fail(read.status().with_context("--peers"), Origin::kFile);
    peers = std::move(read).value();
    if (peers.empty()) {
      console.warn(
          fmt::format("--peers: {} has no row of this layer: format {}, E {}, top_k {}, "
                      "hidden {}, intermediate {}",
                      state.peers, quant, settings->spec.num_experts, settings->spec.routing.top_k,
                      settings->spec.hidden_size, settings->spec.intermediate_size));
    }
  }
  if (plots) {  // before the time is spent: can it be written?
    const Status status = check_result_file(plot);
    if (!status.ok()) return console.fail(status, origin_of_refusal(plot, status));
  }
  console.note(1, "measuring this machine's read bandwidth and arithmetic peak");
  settings->options.progress = console.progress("loading");
  FusedMoE::Options options = settings->options;
  Result<Prepared> prepared =
      on_chosen_device(state.common, console, options, [&](const FusedMoE::Options& o) {
        settings->options = o;
        return prepare_stage(state, *settings);
      });
  console.finish_progress();
  const auto fail = [&](const Status& status) {
    return console.fail(status, settings->origin_of(status));
  };
  if (!prepared.ok()) return fail(prepared.status());
  BenchStage& stage = *prepared->stage;

  Context c;
  c.name = state.shape.empty() ? state.model : state.shape;
  c.device = options.device.to_string();
  c.machine = device_name(options.device);
  c.quant = stage.quant();
  c.backend_note = stage.backend_note();
  tell_backend_note(state.common, console, c.backend_note);
  c.ceilings = prepared->ceilings;
  const bool front = state.door == kDoors.front();
  const std::string heading = fmt::format("{} {} {}{}", c.name, state.stage, c.quant,
                                          front ? "" : fmt::format(" given {}", state.door));
  const std::string about =
      fmt::format("{} routing; machine: read {:.1f} GB/s, multiply {:.0f} GFLOP/s ({})",
                  state.routing, c.ceilings.read_gbps, c.ceilings.gflops, c.machine);
  console.print(fmt::format("{}, {}\n", heading, about));
  console.print(fmt::format("{:>8} {:>12} {:>12} {:>9} {:>9} {:>12} {:>7} {:>10} {:>12}  {}\n",
                            "tokens", "median us", "min us", "GB/s", "GFLOP/s", "floor us", "floor",
                            "rel_l2", peers.empty() ? "" : "best peer us", "backend"));
  PlotSeries ours{"moesaic " + state.stage, {}}, floors{"floor", {}};
  for (const std::int64_t tokens : state.tokens) {
    const Result<BenchPoint> point = stage.prepare(tokens);
    if (!point.ok()) return fail(point.status());
    const Result<Samples> samples = measure(*point, state.seconds);
    if (!samples.ok()) return fail(samples.status());
    c.backend = stage.backend();
    const double us = samples->median();
    const double floor = c.ceilings.floor_us(point->bytes, point->flops);
    const double peer = best_of(peers, static_cast<double>(tokens));
    ours.points.emplace_back(static_cast<double>(tokens), us);
    floors.points.emplace_back(static_cast<double>(tokens), floor);
    console.emit(point_json(state, c, tokens, *point, *samples, floor, peer));
    console.print(fmt::format(
        "{:>8} {:>12.1f} {:>12.1f} {:>9.1f} {:>9.1f} {:>12.1f} {:>6.0f}% {:>10.1e} {:>12}  {}\n",
        tokens, us, samples->us.front(), point->bytes / us * 1e-3, point->flops / us * 1e-3, floor,
        100 * floor / us, point->rel_l2, peer > 0 ? fmt::format("{:.1f}", peer) : "", c.backend));
  }
  if (!plots) return kExitOk;
  std::vector<PlotSeries> series = {ours};
  series.insert(series.end(), peers.begin(), peers.end());
  for (PlotSeries& s : series) std::sort(s.points.begin(), s.points.end());
  std::sort(floors.points.begin(), floors.points.end());
  const Status status = write_result(plot, bench_svg(heading, about, series, floors));
  return status.ok() ? kExitOk : console.fail(status, origin_of(plot));
}

}  // namespace

Verb make_bench(CLI::App& root) {
  auto state = std::make_shared<BenchArguments>();
  std::string names;
  for (const std::string_view name : shape_names()) names += fmt::format(" {}", name);
  CLI::App* app = add_verb(
      root, "bench", "Check a stage's result, then time it against what this machine allows",
      "  moesaic bench --shape qwen3-30b --tokens 1,16,512\n"
      "  moesaic bench --shape qwen3-30b --quant fp8-block --json\n"
      "  moesaic bench --model testdata/models/mini-deepseek-v3 --stage layer\n"
      "  moesaic bench --shape 64,8,2048,1024 --routing zipf:1.0 --threads 2\n"
      "  moesaic bench --shape 64,8,2048,1024 --stage layer --door topk\n"
      "  moesaic bench --shape deepseek-v3 --quant fp8-block --device cuda --stage layer \\\n"
      "      --tokens 1,16,256,4096 --plot time.svg --peers peers.jsonl\n"
      "  moesaic bench --shape 64,8,2048,1024 --stage layer --ranks 4 --tokens 16,256\n"
      "\nfloor us = max(bytes that must move / measured read bandwidth, operations / measured "
      "multiply-add peak)\n\nShapes:" +
          names + "\n\nSchemes of random weights beyond --quant's: " + stored_scheme_names() +
          "\n");
  CLI::Option_group* source = app->add_option_group("layer", "The layer to time: one of");
  source
      ->add_option("--model", state->model,
                   "Folder with config.json and safetensors, or a GGUF file")
      ->check(not_empty());
  source
      ->add_option("--shape", state->shape,
                   "Shape name, or E,k,H,I[,activation]; weights drawn from --seed")
      ->check(not_empty());
  source->require_option(1);
  add_layer_number(*app, state->layer, "Layer of --model; default: the first MoE layer");
  // As text: a list of CLI11's drops what is empty.
  app->add_option_function<std::vector<std::string>>(
         "--tokens",
         [state](const std::vector<std::string>& lists) {
           state->tokens.clear();
           for (const std::string& list : lists) {
             const std::vector<std::int64_t> more = numbers_of(list);
             state->tokens.insert(state->tokens.end(), more.begin(), more.end());
           }
         },
         "Numbers of tokens, one point each")
      ->type_name("INT,...")
      ->check(whole_numbers(1, std::int64_t{1} << 20))
      ->default_str(fmt::format("{}", fmt::join(state->tokens, ",")));
  app->add_option("--stage", state->stage, "What to time; kernel: the experts in a ModularKernel")
      ->check(one_of({"gate", "route", "experts", "kernel", "layer"}))
      ->capture_default_str();
  app->add_option("--door", state->door,
                  "What a layer is called with: hidden states alone, with router logits, or with "
                  "experts and weights (topk), which leave out the gate and the router")
      ->check(one_of({kDoors.begin(), kDoors.end()}))
      ->capture_default_str();
  app->add_option("--routing", state->routing, "uniform, zipf:S or one")->capture_default_str();
  app->add_option("--seconds", state->seconds, "Time to spend on each point, at least")
      ->check(number(0.0, 3600.0))
      ->capture_default_str();
  CLI::Option* plot =
      app->add_option(
             "--plot", state->plot,
             "File to draw time against tokens into, as SVG; - is stdout (the table then goes "
             "to stderr)")
          ->check(not_empty());
  app->add_flag("--force", state->force, "Replace an existing file that is no plot of bench")
      ->needs(plot);
  app->add_option("--peers", state->peers,
                  "JSON lines with other implementations' times (impl, format, E, top_k, hidden, "
                  "intermediate, M, gemm12_us), for the table and the plot")
      ->check(not_empty());
  add_common_options(*app, state->common);
  add_rank_options(*app, state->ranks);
  return {app, [state] { return run_bench(*state); }};
}

}  // namespace moesaic::tool
