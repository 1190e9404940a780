// One rank of the tests of a rearrangement whose rank 1 fails in the middle; rearrange_mpi_test.py
// starts it under mpirun.
//   rearrange_ranks ok|kill|delay|count
// Every rank that lives prints one line: "rank R: ok", "rank R: reported after N ms: <reason>", or
// one with WRONG in it.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/communicator.h"
#include "parallel/reports.h"
#include "support/metrics.h"

namespace {

using namespace moesaic;
using Clock = std::chrono::steady_clock;

constexpr int kTimeoutMs = 5000;  // where a rank is gone or late
constexpr std::int64_t kExperts = 8, kSlots = 12, kTokens = 6;

MoeLayerSpec spec_of() {
  MoeLayerSpec spec = test::small_spec();
  spec.num_experts = spec.routing.num_experts = kExperts;
  spec.routing.top_k = 4;
  return spec;
}

// A forward call on rows of this rank's own, against one rank.
std::string forward(const FusedMoE& layer, const Tensor& x, const test::LayerRun& want) {
  Tensor out = Tensor::uninitialized(DType::kF32, x.shape()).value();
  const Status status = layer.forward(x.view(), out.view());
  if (!status.ok()) return status.to_string();
  std::string why;
  return test::same_bits(out.view(), want.output.view(), &why) ? "" : "WRONG output: " + why;
}

// What rank 1 does instead of its next step.
void misbehave(std::string_view mode, Communicator& world) {
  if (mode == "kill") raise(SIGKILL);
  if (mode == "delay") test::wait_for("reported", world.size(), false);
  if (mode == "count") {
    const std::vector<std::byte> odd(17);
    std::vector<std::span<const std::byte>> send(static_cast<std::size_t>(world.size()), odd);
    std::vector<std::vector<std::byte>> in(send.size(), std::vector<std::byte>(17));
    const std::vector<std::span<std::byte>> receive(in.begin(), in.end());
    static_cast<void>(world.exchange("rearrange", send, receive));
  }
}

std::string run(const std::shared_ptr<Communicator>& world, std::string_view mode,
                Clock::time_point& failed_from) {
  const test::LayerTensors tensors = test::make_tensors(61, spec_of());
  const Tensor x = test::random_hidden(62 + static_cast<std::uint64_t>(world->rank()), kTokens,
                                       tensors.spec.hidden_size);
  FusedMoE::Options options;
  options.num_threads = 1;
  const test::LayerRun want = test::run_layer(test::make_layer(tensors, options), x);
  options.ranks.communicator = world;
  options.parallel.ep_size = options.parallel.dp_size = world->size();
  options.parallel.ep_rank = options.parallel.dp_rank = world->rank();
  options.ranks.enable_eplb = true;
  options.ranks.num_redundant_experts = kSlots - kExperts;
  auto layer = FusedMoE::create(tensors.weights(), options);
  if (!layer.ok()) return layer.status().to_string();

  // Loading differs by more than a time-out.
  test::note(world->rank(), "ready");
  test::wait_for("ready", world->size(), true);
  const auto before = layer->physical_to_logical();
  std::vector<std::int32_t> wanted(before.rbegin(), before.rend());
  Status status = layer->begin_rearrange(wanted);
  bool done = false;
  for (int step = 0; status.ok() && !done; ++step) {
    const std::string served = forward(*layer, x, want);
    if (!served.empty()) return served;
    failed_from = Clock::now();
    if (step == 2 && world->rank() == 1) misbehave(mode, *world);
    const auto moved = layer->continue_rearrange(1);
    status = moved.ok() ? Status() : moved.status();
    done = moved.ok() && *moved;
  }
  if (status.ok()) {
    if (layer->physical_to_logical() != wanted) return "WRONG map";
    return forward(*layer, x, want);
  }
  // Neither half a rearrangement nor a result from a broken world.
  if (layer->physical_to_logical() != before) return "WRONG map after a failure";
  if (forward(*layer, x, want).empty()) return "WRONG: a result without its peers";
  return status.to_string();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "ok";
  const bool lost = mode == "kill" || mode == "delay";
  auto made = make_mpi_communicator({.timeout_ms = lost ? kTimeoutMs : test::kHangGuardMs});
  if (!made.ok()) {
    fmt::print("no communicator: {}\n", made.status().to_string());
    return 2;
  }
  const std::shared_ptr<Communicator> world = std::move(made).value();
  Clock::time_point from = Clock::now();
  const std::string what = run(world, mode, from);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - from).count();
  fmt::print("rank {}: {}\n", world->rank(),
             what.empty() ? "ok" : fmt::format("reported after {} ms: {}", ms, what));
  std::fflush(stdout);
  if (what.empty()) return 0;
  // A broken world cannot be finalised; others may still be about to report.
  test::note(world->rank(), "reported");
  test::wait_for("reported", world->size(), mode != "kill");
  _exit(5);
}
