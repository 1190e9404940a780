// One rank of the tests of the MPI communicator; mpi_test.py starts it under mpirun.
//   mpi_ranks ok|two|kill|delay|count
// Every rank that lives prints one line: "rank R: ok" or "rank R: reported: <reason>". Rank 1 is
// the faulty one.
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string_view>

#include "moesaic/communicator.h"
#include "parallel/reports.h"

namespace {

using namespace moesaic;

constexpr int kTimeoutMs = 5000;  // where a rank is gone or late
constexpr int kSteps = 20;

// Message sizes from nothing to well beyond what travels eagerly; the last are so long that they are
// sent as blocks and a rest.
std::size_t size_of(int step, int from) {
  if (step == kSteps - 1) return (std::size_t{1} << 24) + static_cast<std::size_t>(13 * from + 1);
  return static_cast<std::size_t>(step) * 7001 + static_cast<std::size_t>(from) * 13;
}

Status all_to_all(Communicator& c, int step, bool wrong_count) {
  const auto n = static_cast<std::size_t>(c.size());
  std::vector<std::vector<std::byte>> out(n);
  std::vector<std::vector<std::byte>> in(n);
  std::vector<std::span<const std::byte>> send(n);
  std::vector<std::span<std::byte>> recv(n);
  for (std::size_t r = 0; r < n; ++r) {
    const bool spoil = wrong_count && static_cast<int>(r) != c.rank();
    out[r].assign(size_of(step, c.rank()) + (spoil ? 4 : 0),
                  static_cast<std::byte>(16 * c.rank() + static_cast<int>(r)));
    in[r].assign(size_of(step, static_cast<int>(r)), std::byte{0xFF});
    send[r] = out[r];
    recv[r] = in[r];
  }
  MOESAIC_RETURN_IF_ERROR(c.exchange("all_to_all", send, recv));
  for (std::size_t r = 0; r < n; ++r) {
    for (const std::byte b : in[r]) {
      if (b != static_cast<std::byte>(16 * r + static_cast<std::size_t>(c.rank()))) {
        return {StatusCode::kInternal, fmt::format("step {}: wrong bytes from rank {}", step, r)};
      }
    }
  }
  std::vector<float> sum(1001, static_cast<float>(c.rank() + 1));
  MOESAIC_RETURN_IF_ERROR(c.all_reduce_sum("sum", sum));
  for (const float v : sum) {
    if (v != static_cast<float>(n * (n + 1) / 2)) {
      return {StatusCode::kInternal, fmt::format("step {}: sum is {}", step, v)};
    }
  }
  return {};
}

Status run(Communicator& c, std::string_view mode) {
  for (int step = 0; step < kSteps; ++step) {
    const bool now = step == kSteps / 2 && c.rank() == 1;
    if (now && mode == "kill") raise(SIGKILL);
    if (now && mode == "delay") test::wait_for("reported", c.size(), false);
    MOESAIC_RETURN_IF_ERROR(all_to_all(c, step, now && mode == "count"));
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "ok";
  const bool lost = mode == "kill" || mode == "delay";
  auto c = make_mpi_communicator({.timeout_ms = lost ? kTimeoutMs : test::kHangGuardMs});
  if (!c.ok()) {
    fmt::print("no communicator: {}\n", c.status().to_string());
    return 2;
  }
  if (mode == "two") {  // of which the first goes before the second has done anything
    auto second = make_mpi_communicator({.timeout_ms = test::kHangGuardMs});
    c = std::move(second);
  }
  const int rank = (*c)->rank();
  const Status status = run(**c, mode);
  fmt::print("rank {}: {}\n", rank,
             status.ok() ? "ok" : fmt::format("reported: {}", status.to_string()));
  std::fflush(stdout);
  if (status.ok()) return 0;
  // A broken world cannot be finalised; others may still be about to report.
  test::note(rank, "reported");
  test::wait_for("reported", (*c)->size(), mode != "kill");
  _exit(5);
}
