#include "bench_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "cpu/tiers.h"
#include "rank_effects.h"
#include "version.h"

namespace moesaic::tool {
namespace {

struct Samples {
  std::vector<double> us;       // sorted
  std::int64_t bytes_sent = 0;  // per call
};

// A sample is one pass over all rotations, per call; rank 0 says how many.
Result<Samples> measure(const BenchPoint& point, const BenchStage& stage, double seconds,
                        Communicator& communicator) {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t kMinSamples = 5;
  Samples samples;
  // Microseconds of a pass.
  const auto pass = [&]() -> Result<double> {
    if (point.pass) return point.pass();
    const auto start = Clock::now();
    for (int i = 0; i < point.rotations; ++i) MOESAIC_RETURN_IF_ERROR(point.run(i));
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  };
  MOESAIC_RETURN_IF_ERROR(pass().status());
  const auto begin = Clock::now();
  std::int64_t bytes = 0;
  for (;;) {
    const bool more = samples.us.size() < kMinSamples ||
                      std::chrono::duration<double>(Clock::now() - begin).count() < seconds;
    // All ranks begin a sample together.
    MOESAIC_ASSIGN_OR_RETURN(const auto go,
                             communicator.control().all_gather("more", more ? 1 : 0));
    if (go[0] == 0) break;
    const std::int64_t before = stage.bytes_sent();
    MOESAIC_ASSIGN_OR_RETURN(const double us, pass());
    samples.us.push_back(us / point.rotations);
    bytes += stage.bytes_sent() - before;
  }
  samples.bytes_sent = bytes / (std::ssize(samples.us) * point.rotations);
  std::sort(samples.us.begin(), samples.us.end());
  return samples;
}

// Figures of all ranks, in thousandths.
Result<std::vector<double>> gather(Communicator& communicator, double mine) {
  MOESAIC_ASSIGN_OR_RETURN(const auto all, communicator.control().all_gather(
                                               "figures", static_cast<std::int64_t>(mine * 1e3)));
  std::vector<double> figures;
  figures.reserve(all.size());
  for (const std::int64_t v : all) figures.push_back(static_cast<double>(v) * 1e-3);
  return figures;
}

// Of all ranks together: of threads, and of ranks on one GPU, what they share; else the sum of what
// each measures while the others do.
Result<Ceilings> ceilings_of_all(const BenchSettings& settings, const RankContext& c) {
  const bool alone = c.shares_device;
  Ceilings mine;
  Status measured;
  if (!alone || c.rank == 0) {
    const int threads = alone ? std::min(c.layer.num_threads * c.size, cpu::resolve_threads(0))
                              : c.layer.num_threads;
    Result<Ceilings> result = stage_ceilings("layer", settings, threads);
    measured = result.status();
    if (result.ok()) mine = *result;
  }
  Ceilings all;
  MOESAIC_ASSIGN_OR_RETURN(const auto reads, gather(*c.communicator, mine.read_gbps));
  MOESAIC_ASSIGN_OR_RETURN(const auto gflops, gather(*c.communicator, mine.gflops));
  MOESAIC_RETURN_IF_ERROR(measured);
  for (const double v : reads) all.read_gbps += v;
  for (const double v : gflops) all.gflops += v;
  return all;
}

}  // namespace

int bench_on_rank(const BenchRanksRequest& request, const RankContext& c) {
  std::optional<Checkpoint> checkpoint;
  Origin origin = Origin::kOption;
  Result<BenchSettings> settings = request.settings(checkpoint, origin);
  if (!settings.ok()) return c.fail(settings.status(), origin);
  const Status used = check_rank_effects(c.asked, c.layer.parallel, settings->spec);
  if (!used.ok()) return c.fail(used, Origin::kOption);
  const std::string quant = settings->options.quant;
  const std::int64_t most = settings->options.max_tokens;
  settings->options = c.layer;
  settings->options.quant = quant;
  settings->options.max_tokens = most;
  // Ranks with the same rows.
  const ParallelConfig& p = c.layer.parallel;
  const int peers = p.is_sequence_parallel() ? 1 : p.engine_tp_size();
  settings->engine = c.rank / peers;
  const Result<Ceilings> ceilings = ceilings_of_all(*settings, c);
  if (!ceilings.ok()) return c.fail(ceilings.status(), Origin::kOption);
  const Result<std::unique_ptr<BenchStage>> stage = make_bench_stage("layer", *settings);
  if (!stage.ok()) return c.fail(stage.status(), settings->origin_of(stage.status()));

  const int engines = c.size / peers;
  const bool gpu = c.layer.device.is_cuda();
  c.console.print(fmt::format(
      "{} layer {}, {} routing, {} ranks over {}: tp {}, dp {}{}{}, transport {}, reduction {}\n"
      "all ranks: read {:.1f} GB/s, multiply {:.0f} GFLOP/s\n"
      "{:>8} {:>8} {:>12} {:>12} {:>12} {:>7} {:>16} {:>10}  {}\n",
      request.name, (*stage)->quant(), request.routing, c.size, c.communicator->name(),
      p.engine_tp_size(), p.dp_size, p.ep_size > 1 ? ", whole experts" : ", slices",
      p.is_sequence_parallel() ? ", sequence parallel" : "",
      rank_transport_name((*stage)->transport()),
      rank_reduction_name(c.layer.ranks.reduction_in_force()), ceilings->read_gbps,
      ceilings->gflops, "tokens", "in all", "median us", "min us", "tokens/s", "floor",
      "sent B/rank/tok", "rel_l2", "backend"));
  for (const std::int64_t tokens : request.tokens) {
    const Result<BenchPoint> point = (*stage)->prepare(tokens);
    if (!point.ok()) return c.fail(point.status(), Origin::kOption);
    const Result<Samples> samples = measure(*point, **stage, request.seconds, *c.communicator);
    if (!samples.ok()) return c.fail(samples.status(), Origin::kOption);
    const auto median = gather(*c.communicator, samples->us[samples->us.size() / 2]);
    const auto least = gather(*c.communicator, samples->us.front());
    const auto bytes = gather(*c.communicator, static_cast<double>(samples->bytes_sent));
    const auto error = gather(*c.communicator, point->rel_l2 * 1e9);
    for (const auto* r : {&median, &least, &bytes, &error}) {
      if (!r->ok()) return c.fail(r->status(), Origin::kOption);
    }
    const double slowest = *std::max_element(median->begin(), median->end());
    const double fastest = *std::max_element(least->begin(), least->end());
    const double worst = *std::max_element(error->begin(), error->end()) * 1e-9;
    double sent = 0;
    for (const double b : *bytes) sent += b / c.size;
    const std::int64_t all = tokens * engines;
    const double floor = ceilings->floor_us(point->bytes, point->flops);
    c.console.emit(
        {{"shape", request.name},
         {"stage", "layer"},
         {"tokens", tokens},
         {"tokens_in_all", all},
         {"device", gpu ? "cuda" : "cpu"},
         {"backend", (*stage)->backend()},
         {"backend_note", (*stage)->backend_note()},
         {"door", settings->door},
         {"quant", (*stage)->quant()},
         {"routing", request.routing},
         {"ranks", c.size},
         {"communicator", c.communicator->name()},
         {"tp", p.engine_tp_size()},
         {"dp", p.dp_size},
         {"ep", p.ep_size > 1},
         {"sp", p.is_sequence_parallel()},
         {"transport", rank_transport_name((*stage)->transport())},
         {"reduction", rank_reduction_name(c.layer.ranks.reduction_in_force())},
         {"combine_dtype", c.layer.ranks.combine_dtype == DType::kBF16 ? "bf16" : "f32"},
         {"median_us", slowest},
         {"min_us", fastest},
         {"samples", samples->us.size()},
         {"bytes", point->bytes},
         {"flops", point->flops},
         {"gbps", point->bytes / slowest * 1e-3},
         {"tflops", point->flops / slowest * 1e-6},
         {"floor_us", finite(floor)},
         {"floor_pct", finite(100 * floor / slowest)},
         {"ceilings", {{"read_gbps", ceilings->read_gbps}, {"gflops", ceilings->gflops}}},
         {"tokens_per_s", finite(1e6 * static_cast<double>(all) / slowest)},
         {"bytes_sent_per_rank", sent},
         {"per_rank", {{"median_us", *median}, {"bytes_sent", *bytes}}},
         {"rel_l2", finite(worst)},
         {"bound", finite(point->bound)},
         {"threads", c.layer.num_threads},
         {"commit", commit()},
         {"compiler", compiler()},
         {"machine", gpu ? gpu_name(c.layer.device) : cpu_model_name()}});
    c.console.print(fmt::format(
        "{:>8} {:>8} {:>12.1f} {:>12.1f} {:>12.4g} {:>6.0f}% {:>16.1f} {:>10.1e}  {}\n", tokens,
        all, slowest, fastest, 1e6 * static_cast<double>(all) / slowest, 100 * floor / slowest,
        sent / static_cast<double>(tokens), worst, (*stage)->backend()));
  }
  return kExitOk;
}

}  // namespace moesaic::tool
