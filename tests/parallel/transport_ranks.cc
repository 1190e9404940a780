// One rank of the tests of transports between processes; mpi_test.py starts it under mpirun.
//   transport_ranks TRANSPORT STAGE FAULT
//     TRANSPORT  all_to_all, all_gather_reduce_scatter, all_to_all_batched
//     STAGE      dispatch, combine: where rank 1 fails, in its third call
//     FAULT      ok, kill (before it sends), kill_inside (soon after), delay (until the others have
//     reported), rows (its header
//                announces one row too many), bytes (its messages are a few bytes short)
// Every rank runs the same few steps and compares its rows with one rank's result. Those that live
// print one line: "rank R: ok", "rank R: reported after N ms: <reason>" or "rank R: WRONG: ...".
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

#include "moesaic/communicator.h"
#include "parallel/reports.h"
#include "prepare_finalize/transport_case.h"
#include "support/metrics.h"
#include "support/random.h"

namespace {

using namespace moesaic;
using Clock = std::chrono::steady_clock;

constexpr int kTimeoutMs = 5000;  // where a rank is gone or late
constexpr int kSteps = 8;
constexpr int kFaultyStep = 3;
constexpr std::int64_t kRowsPerRank = 40;

// Passes everything on, but for one call.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> real, std::string_view stage,
                     std::string_view fault)
      : real_(std::move(real)), stage_(stage), fault_(fault) {}

  std::string_view name() const override { return real_->name(); }
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  Status state() const override { return real_->state(); }
  std::int64_t bytes_sent() const override { return real_->bytes_sent(); }
  Status abandon(std::string_view reason) override { return real_->abandon(reason); }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks, int id) override {
    return real_->subgroup(ranks, id);
  }

  Status exchange(std::string_view what, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> recv,
                  std::span<std::int64_t> received) override {
    const bool now = rank() == 1 && what.starts_with(stage_) && ++calls_ == kFaultyStep;
    if (!now) return real_->exchange(what, send, recv, received);
    if (fault_ == "kill") raise(SIGKILL);
    if (fault_ == "kill_inside") {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        raise(SIGKILL);
      }).detach();
    }
    if (fault_ == "delay") test::wait_for("reported", size(), false);
    std::vector<std::vector<std::byte>> changed;
    std::vector<std::span<const std::byte>> out(send.begin(), send.end());
    for (const auto& message : send) changed.emplace_back(message.begin(), message.end());
    for (std::size_t r = 0; r < out.size(); ++r) {
      if (static_cast<int>(r) == rank()) continue;
      std::vector<std::byte>& m = changed[r];
      if (fault_ == "rows") {  // behind the refusal's code
        std::int32_t rows = 0;
        std::memcpy(&rows, m.data() + 4, sizeof(rows));
        ++rows;
        std::memcpy(m.data() + 4, &rows, sizeof(rows));
      }
      if (fault_ == "bytes") m.resize(m.size() - 6);
      out[r] = m;
    }
    const Status status = real_->exchange(what, out, recv, received);
    // On a busy machine the end comes late; nothing may follow this call.
    if (fault_ == "kill_inside") std::this_thread::sleep_for(std::chrono::minutes(1));
    return status;
  }

 private:
  std::unique_ptr<Communicator> real_;
  std::string_view stage_, fault_;
  int calls_ = 0;
};

// Empty, or how the rows differ from one rank's.
std::string difference(const test::StandardCase& c, const Tensor& want, const Tensor& got,
                       std::int64_t first, test::Transport transport) {
  const std::int64_t hidden = c.problem.hidden_size;
  const auto rows = [&](const Tensor& t) {
    return ConstTensorView(t.data() + first * hidden * 4, DType::kF32, Shape{kRowsPerRank, hidden});
  };
  if (transport == test::Transport::kBatched) {
    std::string why;
    return test::same_bits(rows(got), rows(want), &why) ? "" : why;
  }
  const auto result = test::compare(test::to_doubles(rows(got)), test::to_doubles(rows(want)));
  return result.rel_l2 <= 16.0 / (1 << 24) ? "" : result.describe;
}

std::string run(std::unique_ptr<Communicator> real, test::Transport transport,
                std::string_view stage, std::string_view fault) {
  const int rank = real->rank();
  MoeProblem problem = test::small_problem("fp8-block");
  problem.num_experts = problem.num_local_experts = 8;
  problem.top_k = 3;
  const auto c = test::make_case(1, problem, kRowsPerRank * real->size(), DType::kBF16, 0.05);
  const std::string backend(choose_experts(c.problem).value()->name);
  const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
  const std::shared_ptr<Communicator> comm =
      std::make_shared<FaultyCommunicator>(std::move(real), stage, fault);
  auto made = test::RankKernel::create(
      c, {.transport = transport, .backend = backend, .max_tokens = kRowsPerRank}, comm);
  if (!made.ok()) return fmt::format("WRONG: {}", made.status().to_string());
  Tensor output = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
  const std::int64_t first = rank * kRowsPerRank;
  // Loading differs by more than a time-out.
  test::note(rank, "ready");
  test::wait_for("ready", comm->size(), true);
  for (int step = 0; step < kSteps; ++step) {
    test::poison(output.view());
    (*made)->poison_workspace();
    const auto begin = Clock::now();
    const Status status = (*made)->kernel().run((*made)->args(c, first, kRowsPerRank, output));
    if (!status.ok()) {
      const auto ms =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
      // The first reason stays the answer.
      const Status again = (*made)->kernel().run((*made)->args(c, first, kRowsPerRank, output));
      if (again.ok()) return "WRONG: the next call worked on a broken communicator";
      return fmt::format("reported after {} ms: {}", ms, status.to_string());
    }
    const std::string why = difference(c, want, output, first, transport);
    if (!why.empty()) return fmt::format("WRONG: step {}: {}", step, why);
  }
  return "ok";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print("usage: transport_ranks TRANSPORT STAGE FAULT\n");
    return 2;
  }
  auto transport = test::Transport::kAllToAll;
  for (const auto t : test::kTransports) {
    if (std::string_view(argv[1]) == test::transport_name(t)) transport = t;
  }
  const std::string_view fault = argv[3];
  const bool killed = fault.starts_with("kill");
  auto c = make_mpi_communicator(
      {.timeout_ms = killed || fault == "delay" ? kTimeoutMs : test::kHangGuardMs});
  if (!c.ok()) {
    fmt::print("no communicator: {}\n", c.status().to_string());
    return 2;
  }
  const int rank = (*c)->rank(), size = (*c)->size();
  const std::string line = run(std::move(*c), transport, argv[2], fault);
  fmt::print("rank {}: {}\n", rank, line);
  std::fflush(stdout);
  if (line == "ok") return 0;
  // A broken world cannot be finalised; others may still be about to report.
  test::note(rank, "reported");
  test::wait_for("reported", size, !killed);
  _exit(5);
}
