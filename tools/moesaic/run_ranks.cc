#include "run_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "layer_io.h"
#include "layer_origin.h"
#include "moesaic/eplb.h"
#include "moesaic/parallel.h"
#include "rank_balance.h"
#include "rank_effects.h"
#include "spec_text.h"

namespace moesaic::tool {
namespace {

struct RankTiming {
  double median_us = 0, min_us = 0;
  int samples = 0;
  std::int64_t bytes_sent = 0;  // per call
};

// As time_forward; rank 0 says how long.
Result<RankTiming> time_on_ranks(const FusedMoE& layer, const Tensor& x, LayerOutput& result,
                                 int repeat, Communicator& communicator) {
  using Clock = std::chrono::steady_clock;
  constexpr int kMinSamples = 3, kMaxSamples = 1000;
  std::vector<double> us;
  double spent = 0;
  const std::int64_t before = layer.bytes_sent();
  std::int64_t asking = 0;
  for (;;) {
    const int taken = static_cast<int>(us.size());
    const bool more =
        repeat > 0 ? taken < repeat : taken < kMinSamples || (spent < 1e6 && taken < kMaxSamples);
    const std::int64_t sent = communicator.bytes_sent();
    MOESAIC_ASSIGN_OR_RETURN(const auto go,
                             communicator.control().all_gather("more", more ? 1 : 0));
    asking += communicator.bytes_sent() - sent;
    if (go[0] == 0) break;
    const auto begin = Clock::now();
    MOESAIC_RETURN_IF_ERROR(forward(layer, x, result));
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    spent += us.back();
  }
  RankTiming t;
  t.samples = static_cast<int>(us.size());
  t.bytes_sent = (layer.bytes_sent() - before - asking) / std::max(t.samples, 1);
  std::sort(us.begin(), us.end());
  t.median_us = us.empty() ? 0 : us[us.size() / 2];
  t.min_us = us.empty() ? 0 : us.front();
  return t;
}

// Rows of `part` of every rank that hands some in, brought together in `whole` on rank 0.
Status collect(const RankContext& c, std::int64_t tokens, const Tensor& part, Tensor& whole) {
  const std::int64_t row_bytes = tokens > 0 ? whole.bytes() / tokens : 0;
  std::vector<std::span<const std::byte>> send(static_cast<std::size_t>(c.size));
  std::vector<std::span<std::byte>> receive(static_cast<std::size_t>(c.size));
  if (c.rows(tokens, c.rank).mine) {
    send[0] = {part.data(), static_cast<std::size_t>(part.bytes())};
  }
  for (int r = 0; c.rank == 0 && r < c.size; ++r) {
    const RankContext::Rows rows = c.rows(tokens, r);
    if (!rows.mine) continue;
    receive[static_cast<std::size_t>(r)] = {whole.data() + rows.first * row_bytes,
                                            static_cast<std::size_t>(rows.count * row_bytes)};
  }
  return c.communicator->exchange("collect", send, receive);
}

struct PerRank {
  std::vector<std::int64_t> median_ns, min_ns, bytes, weight_bytes;
};
Result<PerRank> share_figures(const RankContext& c, const RankTiming& t, const FusedMoE& layer) {
  PerRank p;
  const auto ns = [](double us) { return static_cast<std::int64_t>(us * 1e3); };
  MOESAIC_ASSIGN_OR_RETURN(p.median_ns,
                           c.communicator->control().all_gather("figures", ns(t.median_us)));
  MOESAIC_ASSIGN_OR_RETURN(p.min_ns, c.communicator->control().all_gather("figures", ns(t.min_us)));
  MOESAIC_ASSIGN_OR_RETURN(p.bytes, c.communicator->control().all_gather("figures", t.bytes_sent));
  MOESAIC_ASSIGN_OR_RETURN(p.weight_bytes,
                           c.communicator->control().all_gather("figures", layer.weight_bytes()));
  return p;
}

// Chosen slots whose expert each rank owns (copies share theirs); with slices every rank computes a
// part of all.
std::vector<std::int64_t> slots_of_ranks(const RankContext& c, const FusedMoE& layer,
                                         const std::vector<std::int64_t>& load) {
  const std::vector<std::int32_t> physical_to_logical = layer.physical_to_logical();
  std::vector<std::int64_t> slots(static_cast<std::size_t>(c.size), 0);
  if (!physical_to_logical.empty()) {
    const auto shares =
        rank_loads(std::vector<double>(load.begin(), load.end()), physical_to_logical, c.size);
    for (std::size_t r = 0; shares.ok() && r < slots.size(); ++r) {
      slots[r] = std::llround((*shares)[r]);
    }
    return slots;
  }
  // The placement in force: round robin may have become linear.
  const ParallelConfig parallel = layer.parallel();
  const auto owners = expert_owners(std::ssize(load), parallel);
  for (std::size_t e = 0; e < load.size(); ++e) {
    if (parallel.ep_size > 1 && owners.ok()) {
      slots[static_cast<std::size_t>((*owners)[e])] += load[e];
    } else {
      for (std::int64_t& s : slots) s += load[e];
    }
  }
  return slots;
}

void report(const RankContext& c, const RunRequest& request, const FusedMoE& layer,
            const LayerOutput& all, const RankTiming& timing, const PerRank& figures,
            const std::optional<RankBalance>& balance) {
  const std::int64_t tokens = all.output.shape()[0];
  const std::vector<std::int64_t> load = expert_load(all, layer.spec());
  const std::vector<std::int64_t> slots = slots_of_ranks(c, layer, load);
  const auto us = [](const std::vector<std::int64_t>& ns) {  // the slowest rank's
    return static_cast<double>(*std::max_element(ns.begin(), ns.end())) * 1e-3;
  };
  const double median = us(figures.median_ns);
  const double per_second = median > 0 ? 1e6 * static_cast<double>(tokens) / median : 0;
  Json ranks = Json::array();
  for (int r = 0; r < c.size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    ranks.push_back({{"rank", r},
                     {"tokens", c.rows(tokens, r).count},
                     {"slots", slots[i]},
                     {"median_us", static_cast<double>(figures.median_ns[i]) * 1e-3},
                     {"bytes_sent", figures.bytes[i]},
                     {"weight_bytes", figures.weight_bytes[i]}});
  }
  Json json = {
      {"layer", request.layer},
      {"tokens", tokens},
      {"device", layer.device().is_cuda() ? "cuda" : "cpu"},
      {"backend", layer.experts_backend()},
      {"quant", layer.quant().name},
      {"time_us", {{"median", median}, {"min", us(figures.min_ns)}, {"samples", timing.samples}}},
      {"tokens_per_s", finite(per_second)},
      {"expert_load", load},
      {"output", request.output.path},
      {"parallel", describe_ranks(c, layer)},
      {"per_rank", ranks}};
  if (balance) json["eplb"] = to_json(*balance);
  json["numerics"] = nullptr;  // measured where a row's experts are added up: on one rank
  c.console.emit(json);
  const ParallelConfig& p = c.layer.parallel;
  c.console.print(describe(layer.spec()) + "\n");
  c.console.print(fmt::format(
      "{} token(s) on {} ranks over {}: tp {}, dp {}, {}{}, {} placement, transport {}, reduction "
      "{}\n",
      tokens, c.size, c.communicator->name(), p.engine_tp_size(), p.dp_size,
      p.ep_size > 1 ? "whole experts" : "slices of experts",
      p.is_sequence_parallel() ? ", sequence parallel" : "",
      expert_placement_name(layer.parallel().placement), rank_transport_name(layer.transport()),
      rank_reduction_name(c.layer.ranks.reduction_in_force())));
  c.console.print(fmt::format("backend {}, arithmetic {}\n{:>6} {:>8} {:>8} {:>12} {:>14} {:>12}\n",
                              layer.experts_backend(), layer.quant().name, "rank", "tokens",
                              "slots", "median", "sent per call", "weights"));
  for (int r = 0; r < c.size; ++r) {
    const auto i = static_cast<std::size_t>(r);
    c.console.print(
        fmt::format("{:>6} {:>8} {:>8} {:>12} {:>14} {:>12}\n", r, c.rows(tokens, r).count,
                    slots[i], format_us(static_cast<double>(figures.median_ns[i]) * 1e-3),
                    format_bytes(figures.bytes[i]), format_bytes(figures.weight_bytes[i])));
  }
  c.console.print(fmt::format("time     median {}, min {} of {} call(s), {:.4g} tokens/s\n",
                              format_us(median), format_us(us(figures.min_ns)), timing.samples,
                              per_second));
  c.console.print(fmt::format("load     {}\n", fmt::join(load, " ")));
  if (balance) print(*balance, c.console);
  c.console.print(fmt::format("written  {} (output, topk_ids, topk_weights)\n",
                              checkpoint::escape_controls(request.output.path)));
}

}  // namespace

int run_layer_on_rank(const RunRequest& request, const RankContext& c) {
  if (c.rank == 0) {  // the one that writes, and perhaps the only one that sees the file
    if (const Status status = check_result_file(request.output); !status.ok()) {
      return c.fail(status, origin_of_refusal(request.output, status));
    }
  }
  const auto [path, named] = split_tensor_path(request.input);
  const Result<Checkpoint> checkpoint = Checkpoint::open(request.model);
  if (!checkpoint.ok()) return c.fail(checkpoint.status(), Origin::kFile);
  const Result<MoeLayerSpec> spec = checkpoint->layer(request.layer);
  if (!spec.ok()) return c.fail(spec.status(), Origin::kOption);
  if (const Status status = check_routes_by_hidden_states(*spec); !status.ok()) {
    return c.fail(status, Origin::kOption);
  }
  if (const Status used = check_rank_effects(c.asked, c.layer.parallel, *spec); !used.ok()) {
    return c.fail(used, Origin::kOption);
  }
  const Result<TensorFile> file = TensorFile::open(path);
  if (!file.ok()) return c.fail(file.status().with_context(path), Origin::kFile);
  const Result<Tensor> input =
      read_hidden_states(*file, named.empty() ? "hidden_states" : named, spec->hidden_size);
  if (!input.ok()) return c.fail(input.status().with_context(path), Origin::kFile);

  const std::int64_t tokens = input->shape()[0];
  const RankContext::Rows rows = c.rows(tokens, c.rank);
  std::int64_t most = 1;
  for (int r = 0; r < c.size; ++r) most = std::max(most, c.rows(tokens, r).count);
  FusedMoE::Options options = c.layer;
  options.max_tokens = std::min(most, kMaxTokensPerCall);
  Result<FusedMoE> layer = FusedMoE::from_checkpoint(*checkpoint, request.layer, options);
  if (!layer.ok()) {
    return c.fail(layer.status(), layer_origin(layer.status(), *checkpoint, request.layer));
  }
  c.console.note(
      1, fmt::format("layer {} ready: {} of weights, rows {} to {}", request.layer,
                     format_bytes(layer->weight_bytes()), rows.first, rows.first + rows.count));

  const DType dtype = request.output_dtype == "bf16" ? DType::kBF16 : DType::kF32;
  Result<Tensor> mine = Tensor::uninitialized(input->dtype(), {rows.count, spec->hidden_size});
  Result<LayerOutput> part = make_layer_output(*spec, rows.count, dtype);
  Result<LayerOutput> all = make_layer_output(*spec, tokens, dtype);
  for (const Status& s :
       {mine.ok() ? Status() : mine.status(), part.ok() ? Status() : part.status(),
        all.ok() ? Status() : all.status()}) {
    if (!s.ok()) return c.fail(s, Origin::kFile);
  }
  if (rows.count > 0) {
    const std::int64_t row_bytes = input->bytes() / tokens;
    std::memcpy(mine->data(), input->data() + rows.first * row_bytes,
                static_cast<std::size_t>(mine->bytes()));
  }
  const Result<RankTiming> timing =
      time_on_ranks(*layer, *mine, *part, request.repeat, *c.communicator);
  if (!timing.ok()) return c.fail(timing.status(), Origin::kFile);
  std::optional<RankBalance> balance;
  if (options.ranks.enable_eplb) {
    Result<RankBalance> moved = balance_on_ranks(c, *layer, *mine, *part);
    if (!moved.ok()) return c.fail(moved.status(), Origin::kFile);
    balance = std::move(moved).value();
  }
  Status together = collect(c, tokens, part->output, all->output);
  if (together.ok()) together = collect(c, tokens, part->topk_ids, all->topk_ids);
  if (together.ok()) together = collect(c, tokens, part->topk_weights, all->topk_weights);
  if (!together.ok()) return c.fail(together, Origin::kFile);
  const Result<PerRank> figures = share_figures(c, *timing, *layer);
  if (!figures.ok()) return c.fail(figures.status(), Origin::kFile);
  if (c.rank != 0) return kExitOk;
  if (const Status status = write_layer_output(request.output, *all); !status.ok()) {
    return c.fail(status, origin_of(request.output));
  }
  report(c, request, *layer, *all, *timing, *figures, balance);
  return kExitOk;
}

}  // namespace moesaic::tool
