// --ranks and its companions: one layer spread over processes that mpirun started, or over threads
// of this one.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moesaic/communicator.h"
#include "options.h"

namespace moesaic::tool {

struct RankOptions {
  int ranks = 0;  // 0: as many as mpirun started, else one
  int tp = 1;
  bool ep = true, sp = false;
  std::string placement = "linear", transport = "auto", combine_dtype = "f32";
  std::string engine = "messages", peer_memory = "auto";
  std::string reduction;  // empty: as RankOptions has it
  bool cut_shared = false;
  std::int64_t dual_batch_tokens = 0;
  std::int64_t pair_capacity = 0;
  double timeout_s = 60;
  bool eplb = false;  // run only
  std::int64_t redundant = 0;
};
void add_rank_options(CLI::App& app, RankOptions& options);
// --eplb and --redundant.
void add_balance_options(CLI::App& app, RankOptions& options);

// Whether the verb is to run over several ranks.
bool wants_ranks(const RankOptions& options);

// kInvalidArgument for an option that one rank alone would ignore.
Status check_rank_options(const RankOptions& options);

// What rank 0 of them would make a layer of, on a communicator on which nothing is sent. `options`
// then has the number of ranks, mpirun's too. kInvalidArgument also for how long to wait for others.
Result<FusedMoE::Options> explained_options(RankOptions& options, const CommonOptions& common,
                                            std::int64_t max_tokens);
// Whether this process is the one of mpirun's that speaks for all, or alone.
bool speaks_for_all();

// What ranks of one process failed with, in the order in which they did.
struct RankFailures {
  struct Failure {
    int rank = 0;
    Status status;
    Origin origin = Origin::kOption;
  };
  std::mutex mutex;
  std::vector<Failure> all;
};

// One rank of the verb.
struct RankContext {
  int rank = 0, size = 1;
  Console console{false, 0};  // results appear on rank 0 only, messages carry the rank's number
  std::shared_ptr<Communicator> communicator;
  bool shares_device = false;  // all ranks are threads on the CPU, or on one GPU
  RankOptions asked;           // by the command line
  FusedMoE::Options layer;     // parallel, communicator, transport, reduction, num_threads

  // Rows of `tokens` that this rank has, when they are dealt out in stretches to the engines (and
  // under sequence parallelism to their ranks).
  struct Rows {
    std::int64_t first = 0, count = 0;
    bool mine = false;  // this rank is the one that hands in the result for them
  };
  Rows rows(std::int64_t tokens, int of_rank) const;

  std::shared_ptr<RankFailures> failures;  // of threads; absent for processes

  // Reports a failure (of threads the first one, once all have ended); the other ranks learn it
  // instead of waiting.
  int fail(const Status& status, Origin origin) const;
};

// body on every rank. Returns the exit code of this process: rank 0's, or that of a rank that
// failed.
int run_on_ranks(const RankOptions& options, const CommonOptions& common,
                 const std::function<int(const RankContext&)>& body);

// The part of a JSON result that says how the layer was spread.
Json describe_ranks(const RankContext& context, const FusedMoE& layer);

}  // namespace moesaic::tool
