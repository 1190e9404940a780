// A layer on the processes of mpirun: every way to spread it over 2, 3, .. all of them equals one
// rank.
//   mpi_matrix EVERY FOLDER...
// Runs every EVERY-th combination on the checkpoints in the folders. Each rank prints what is wrong
// there; rank 0 ends with "N cases, all equal" or "N cases, some differ".
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>

#include "layer/rank_case.h"

namespace {

using namespace moesaic;

struct Tally {
  int cases = 0, wrong = 0;
};

// The first `size` ranks take part.
void run_size(Communicator& world, int size, int every, const test::RankProblem& problem,
              const std::string& what, Tally& tally) {
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  int number = 0;
  for (test::RankCombo combo : test::rank_combos(size)) {
    ++number;
    if (number % every != 0) continue;
    combo.dual = number / every % 2 == 1 && combo.moves_rows();
    // Slices must divide the intermediate size: the layer refuses others on all ranks alike.
    if (!combo.ep && !problem.slices && size > 1) continue;
    ++tally.cases;
    if (world.rank() >= size) continue;
    const std::shared_ptr<Communicator> group = world.subgroup(members, 100 + size).value();
    const auto tokens = test::uneven_tokens(static_cast<std::uint64_t>(number),
                                            problem.x.shape()[0], combo.dp * combo.pcp);
    const std::string wrong = test::run_rank(problem, combo, tokens, group);
    if (wrong.empty() || wrong.find("need a multiple of tp_size") != std::string::npos) continue;
    ++tally.wrong;
    fmt::print("rank {}: {} {}: {}\n", world.rank(), what, combo.name(), wrong);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print("usage: mpi_matrix EVERY FOLDER...\n");
    return 2;
  }
  // Idle ranks wait for the others to get through the small sizes.
  auto made = make_mpi_communicator({.timeout_ms = 600'000});
  if (!made.ok()) {
    fmt::print("no communicator: {}\n", made.status().to_string());
    return 2;
  }
  Communicator& world = **made;
  const auto begin = std::chrono::steady_clock::now();
  Tally tally;
  for (int i = 2; i < argc; ++i) {
    const std::string folder = argv[i];
    const Checkpoint checkpoint = Checkpoint::open(folder).value();
    // Scales of blocks and groups would be cut by slices this thin.
    const bool scaled =
        checkpoint.layers().front().quant.weight.granularity != ScaleGranularity::kNone;
    for (const char* quant : {"f32", "as-is"}) {
      test::RankProblem problem = test::checkpoint_problem(checkpoint, folder, quant, 24);
      problem.slices = !scaled;
      for (int size = 2; size <= world.size(); ++size) {
        run_size(world, size, std::atoi(argv[1]), problem, folder + " " + quant, tally);
      }
    }
  }
  const auto wrong = world.all_gather("end", tally.wrong);
  const bool equal =
      wrong.ok() && std::accumulate(wrong->begin(), wrong->end(), std::int64_t{0}) == 0;
  if (world.rank() == 0) {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print("{} cases, {}, {:.1f} s on {} ranks\n", tally.cases,
               equal ? "all equal" : "some differ", seconds, world.size());
  }
  return equal ? 0 : 1;
}
