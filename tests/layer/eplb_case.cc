#include "layer/eplb_case.h"

#include <fmt/format.h>

#include <cstddef>
#include <thread>
#include <utility>

#include "support/hang_guard.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic::test {

MoeLayerSpec eplb_spec() {
  MoeLayerSpec spec = small_spec();
  spec.num_experts = spec.routing.num_experts = 12;
  spec.routing.top_k = 5;
  spec.routing.method = RoutingMethod::kGroupedTopK;
  spec.routing.scoring_func = ScoringFunc::kSigmoid;
  spec.routing.num_expert_group = 4;
  spec.routing.topk_group = 3;
  spec.shared.intermediate_size = 16;
  return spec;
}

FusedMoE::Options eplb_options(int rank, int dp, RankTransport transport,
                               const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 5;
  o.ranks.communicator = communicator;
  o.ranks.transport = transport;
  o.parallel.ep_size = kEplbRanks;
  o.parallel.ep_rank = rank;
  o.parallel.dp_size = dp;
  o.parallel.dp_rank = rank * dp / kEplbRanks;
  o.ranks.enable_eplb = true;
  o.ranks.num_redundant_experts = 4;
  o.ranks.eplb_window = 3;
  return o;
}

std::vector<std::int32_t> random_map(std::uint64_t seed, std::int64_t experts, std::int64_t slots) {
  Rng rng(seed);
  std::vector<std::int32_t> map;
  for (std::int64_t s = 0; s < slots; ++s) {
    map.push_back(static_cast<std::int32_t>(s < experts ? s : rng.integer(0, experts - 1)));
  }
  for (std::size_t i = map.size(); i > 1; --i) {
    std::swap(map[i - 1], map[static_cast<std::size_t>(rng.integer(0, std::ssize(map) - 1)) % i]);
  }
  return map;
}

std::vector<std::string> on_ranks(
    const std::function<std::string(int, std::shared_ptr<Communicator>)>& body, int size) {
  auto ranks = make_in_process_communicators(size, {.timeout_ms = kHangGuardMs}).value();
  std::vector<std::string> result(ranks.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      result[i] = body(r, std::shared_ptr<Communicator>(std::move(ranks[i])));
    });
  }
  for (std::thread& t : threads) t.join();
  return result;
}

EplbFixture::EplbFixture(const MoeLayerSpec& spec, FusedMoE::Options one)
    : tensors(make_tensors(51, spec)) {
  x = random_hidden(52, kEplbTokens * kEplbRanks, spec.hidden_size);
  one.num_threads = 1;
  run = run_layer(make_layer(tensors, one), x);
}

ConstTensorView EplbFixture::rows_of(int engine) const {
  const std::int64_t hidden = tensors.spec.hidden_size;
  return {x.data() + engine * kEplbTokens * hidden * 2, x.dtype(), Shape{kEplbTokens, hidden}};
}

std::string EplbFixture::forward(const FusedMoE& layer, int engine, double bound,
                                 FusedMoE::Args args, Tensor* got) const {
  const std::int64_t hidden = tensors.spec.hidden_size, k = tensors.spec.routing.top_k;
  const std::int64_t first = engine * kEplbTokens;
  args.hidden_states = rows_of(engine);
  Tensor out = Tensor::uninitialized(DType::kF32, args.hidden_states.shape).value();
  Tensor ids = Tensor::zeros(DType::kI32, {kEplbTokens, k}).value();
  poison(out.view());
  args.output = out.view();
  args.trace.topk_ids = ids.view();
  const Status status = layer.forward(args);
  if (!status.ok()) return status.to_string();
  const ConstTensorView want(run.output.data() + first * hidden * 4, DType::kF32, out.shape());
  std::string why;
  if (bound > 0) {
    const auto result = compare(to_doubles(out.view()), to_doubles(want));
    if (!(result.rel_l2 <= bound)) return "output: " + result.describe;
  } else if (!same_bits(out.view(), want, &why)) {
    return "output: " + why;
  }
  const ConstTensorView chosen(run.topk_ids.data() + first * k * 4, DType::kI32, ids.shape());
  if (got != nullptr) *got = std::move(out);
  return same_bits(ids.view(), chosen, &why) ? "" : "logical ids: " + why;
}

std::string serve_while_experts_move(FusedMoE& layer, const EplbFixture& f, int engine,
                                     double bound) {
  const std::int64_t experts = f.tensors.spec.num_experts;
  Tensor want, got;
  std::string first = f.forward(layer, engine, bound, {}, &want), why;
  for (std::uint64_t round = 0; round < 6; ++round) {
    const auto before = layer.physical_to_logical();
    const auto wanted = random_map(round, experts, std::ssize(before));
    const Status begun = round % 2 == 0 ? layer.begin_rearrange(wanted) : layer.begin_rebalance();
    if (!begun.ok()) return begun.to_string();
    // Every rank takes every step, whatever it has seen.
    for (bool done = false; !done;) {
      if (first.empty() && layer.physical_to_logical() != before) first = "early switch";
      const auto moved = layer.continue_rearrange(2);
      if (!moved.ok()) return moved.status().to_string();
      done = *moved;
      const std::string now = f.forward(layer, engine, bound, {}, &got);
      if (!first.empty()) continue;
      if (!now.empty()) {
        first = fmt::format("round {} {}", round, now);
      } else if (!same_bits(got.view(), want.view(), &why)) {
        first = fmt::format("round {}, other bits: {}", round, why);
      }
    }
    if (first.empty() && round % 2 == 0 && layer.physical_to_logical() != wanted) {
      first = "not the map that was wanted";
    }
  }
  return first;
}

std::string measure_five_calls(const FusedMoE& layer, const EplbFixture& f, int engine, int engines,
                               double bound) {
  for (int step = 0; step < 5; ++step) {
    const std::string bad = f.forward(layer, engine, bound);
    if (!bad.empty()) return bad;
  }
  const auto load = layer.measured_load();
  if (!load.ok()) return load.status().to_string();
  return *load == choices(f, 0, engines, 3) ? "" : "other loads";
}

std::vector<double> choices(const EplbFixture& f, int first, int last, double times) {
  const std::int64_t k = f.tensors.spec.routing.top_k;
  std::vector<double> count(static_cast<std::size_t>(f.tensors.spec.num_experts), 0.0);
  for (std::int64_t i = first * kEplbTokens * k; i < last * kEplbTokens * k; ++i) {
    count[static_cast<std::size_t>(f.run.topk_ids.as<std::int32_t>()[i])] += times;
  }
  return count;
}

}  // namespace moesaic::test
