// What a transport costs: time and bytes of dispatch and combine alone (no experts run), for the
// ranks that mpirun started or for one. Routing is uniform; bytes are counted by the communicator
// and stand beside what the formula of modular_kernel.h expects for such routing.
//   mpirun -n 4 parallel_bench --tokens 1,16,128
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "moesaic/activation.h"
#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"

namespace {

using namespace moesaic;
using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<std::int64_t> tokens = {1, 16, 128};
  std::vector<std::string> transports = {"all_to_all", "all_gather_reduce_scatter",
                                         "all_to_all_batched"};
  std::int64_t experts = 256, top_k = 8, hidden = 7168;
  std::string quant = "fp8-block", combine = "bf16";
  int repeats = 15;
  int timeout_ms = 60'000;
};

[[noreturn]] void fail(const Status& status, std::string_view what) {
  fmt::print(stderr, "{}: {}\n", what, status.to_string());
  std::exit(5);
}
void must(const Status& status, std::string_view what) {
  if (!status.ok()) fail(status, what);
}
template <class T>
T must(Result<T> result, std::string_view what) {
  must(result.status(), what);
  return std::move(result).value();
}

// Uniform ids, distinct in a row.
Tensor uniform_ids(std::int64_t tokens, const Options& o, int rank) {
  std::mt19937_64 rng(static_cast<std::uint64_t>(rank) * 7919 + 1);
  Tensor ids = must(Tensor::zeros(DType::kI32, {tokens, o.top_k}), "ids");
  auto* row = ids.as<std::int32_t>();
  for (std::int64_t t = 0; t < tokens; ++t, row += o.top_k) {
    for (std::int64_t j = 0; j < o.top_k;) {
      row[j] = static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(o.experts));
      if (std::find(row, row + j, row[j]) == row + j) ++j;
    }
  }
  return ids;
}

// Ranks other than its own that a row goes to, on average.
double remote_ranks(const Options& o, int ranks) {
  double none = 1;
  const double local = static_cast<double>(o.experts) / ranks;
  for (std::int64_t j = 0; j < o.top_k; ++j) {
    none *= (static_cast<double>(o.experts - j) - local) / static_cast<double>(o.experts - j);
  }
  return (ranks - 1) * (1 - none);
}

struct Point {
  double us_dispatch = 0, us_combine = 0;        // median over repeats of the slowest rank
  double bytes_dispatch = 0, bytes_combine = 0;  // out, per token, mean over ranks
  double expect_dispatch = 0, expect_combine = 0;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

class Bench {
 public:
  Bench(const Options& o, std::shared_ptr<Communicator> comm) : o_(o), comm_(std::move(comm)) {}

  Point run(const std::string& transport, std::int64_t tokens) {
    const int ranks = comm_->size();
    const bool batched = transport == "all_to_all_batched";
    AllToAllOptions options;
    options.parallel.ep_size = options.parallel.dp_size = ranks;
    options.parallel.ep_rank = options.parallel.dp_rank = comm_->rank();
    options.max_tokens_per_rank = tokens;
    options.combine_dtype = o_.combine == "bf16" ? DType::kBF16 : DType::kF32;
    const MoeProblem problem = problem_of(options, batched, tokens);
    const auto pf = must(make(transport, problem, options), transport);
    const auto map = must(make_expert_map(o_.experts, options.parallel), "map");
    const Tensor ids = uniform_ids(tokens, o_, comm_->rank());
    Tensor weights = must(Tensor::zeros(DType::kF32, {tokens, o_.top_k}), "weights");
    Tensor hidden = must(Tensor::zeros(DType::kBF16, {tokens, o_.hidden}), "hidden");
    std::fill_n(hidden.as<std::uint16_t>(), tokens * o_.hidden, std::uint16_t{0x3F80});
    Tensor output = must(Tensor::zeros(DType::kBF16, {tokens, o_.hidden}), "output");
    Tensor workspace = must(
        Tensor::zeros(DType::kU8, {must(pf->workspace_size(tokens), "workspace")}), "workspace");
    // What experts would have written.
    Tensor results =
        must(Tensor::zeros(DType::kF32,
                           batched ? Shape{problem.num_local_experts, problem.max_tokens, o_.hidden}
                                   : Shape{problem.max_tokens, o_.hidden}),
             "results");
    std::vector<double> dispatch, combine;
    Point p;
    for (int repeat = -3; repeat < o_.repeats; ++repeat) {
      const std::span<std::byte> memory{workspace.data(),
                                        static_cast<std::size_t>(workspace.bytes())};
      const auto there = [&] {
        return pf->prepare({hidden.view(), weights.view(), ids.view(), map, memory});
      };
      must(comm_->barrier("bench"), "barrier");
      std::int64_t sent = comm_->bytes_sent();
      auto begin = Clock::now();
      const Prepared prepared = must(there(), "prepare");
      const double first = since(begin);
      p.bytes_dispatch = mean_per_token(comm_->bytes_sent() - sent, tokens);
      FinalizeArgs f;
      f.output = output.view();
      f.expert_output = batched ? ConstTensorView(results.view())
                                : ConstTensorView(results.data(), DType::kF32,
                                                  Shape{prepared.hidden_states.dim(0), o_.hidden});
      f.topk_weights = weights.view();
      f.topk_ids = ids.view();
      f.expert_map = map;
      f.reduction = batched ? TopKWeightAndReduce::kDelegate : TopKWeightAndReduce::kNoOp;
      f.workspace = memory;
      must(comm_->barrier("bench"), "barrier");
      sent = comm_->bytes_sent();
      begin = Clock::now();
      must(pf->finalize(f), "finalize");
      const double second = since(begin);
      p.bytes_combine = mean_per_token(comm_->bytes_sent() - sent, tokens);
      const double slow_first = slowest(first);
      const double slow_second = slowest(second);
      if (repeat < 0) continue;
      dispatch.push_back(slow_first);
      combine.push_back(slow_second);
    }
    p.us_dispatch = median(dispatch);
    p.us_combine = median(combine);
    expect(transport, options, tokens, p);
    return p;
  }

 private:
  static double since(Clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }
  double slowest(double us) {
    const auto all =
        must(comm_->all_gather("times", static_cast<std::int64_t>(us * 1000)), "times");
    return static_cast<double>(*std::max_element(all.begin(), all.end())) / 1000;
  }
  double mean_per_token(std::int64_t bytes, std::int64_t tokens) {
    double sum = 0;
    for (const std::int64_t b : must(comm_->all_gather("bytes", bytes), "bytes")) {
      sum += static_cast<double>(b);
    }
    return sum / comm_->size() / static_cast<double>(tokens);
  }

  MoeProblem problem_of(const AllToAllOptions& options, bool batched, std::int64_t tokens) const {
    MoeProblem p;
    p.num_experts = o_.experts;
    p.num_local_experts = static_cast<std::int64_t>(
        must(local_expert_ids(o_.experts, options.parallel), "experts").size());
    p.top_k = o_.top_k;
    p.hidden_size = o_.hidden;
    p.intermediate_size = 128;
    p.activation = must(make_activation("silu"), "activation");
    p.quant = must(quant_scheme_from_name(o_.quant), "quant");
    p.activation_dtype = DType::kBF16;
    p.format = batched ? ActivationFormat::kBatched : ActivationFormat::kStandard;
    p.max_tokens = tokens * comm_->size();
    p.num_threads = 1;
    return p;
  }
  Result<std::unique_ptr<PrepareAndFinalize>> make(const std::string& transport,
                                                   const MoeProblem& problem,
                                                   const AllToAllOptions& options) const {
    for (const PrepareFinalizeBackend& row : prepare_finalize_catalogue()) {
      if (row.name == transport) return row.create(problem, comm_, options);
    }
    return Status(StatusCode::kNotFound, fmt::format("--transport: got {}", transport));
  }

  void expect(const std::string& transport, const AllToAllOptions& options, std::int64_t tokens,
              Point& p) const {
    const int ranks = comm_->size();
    const bool gather = transport == "all_gather_reduce_scatter";
    const bool batched = transport == "all_to_all_batched";
    const bool codes = o_.quant == "fp8-block";
    const auto h = static_cast<double>(o_.hidden);
    const double row = codes ? h + h / 32 : h * (o_.quant == "f32" ? 4 : 2);
    const double slots = 8.0 * static_cast<double>(o_.top_k);
    const double back = h * (options.combine_dtype == DType::kBF16 ? 2 : 4);
    const double copies = gather    ? ranks - 1
                          : batched ? static_cast<double>(o_.top_k) * (ranks - 1) / ranks
                                    : remote_ranks(o_, ranks);
    const double counts =
        batched ? 4.0 * static_cast<double>(o_.experts) * (ranks - 1) / ranks : 0.0;
    const double headers = 8.0 * (ranks - 1);
    p.expect_dispatch =
        copies * (row + (batched ? 0 : slots)) + (headers + counts) / static_cast<double>(tokens);
    p.expect_combine = copies * back + headers / static_cast<double>(tokens);
  }

  const Options& o_;
  std::shared_ptr<Communicator> comm_;
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Time and bytes of dispatch and combine");
  app.add_option("--tokens", o.tokens, "per rank")->delimiter(',');
  app.add_option("--transport", o.transports)->delimiter(',');
  app.add_option("--experts", o.experts);
  app.add_option("--top-k", o.top_k);
  app.add_option("--hidden", o.hidden);
  app.add_option("--quant", o.quant);
  app.add_option("--combine", o.combine, "f32 or bf16");
  app.add_option("--repeats", o.repeats);
  app.add_option("--timeout-ms", o.timeout_ms);
  CLI11_PARSE(app, argc, argv);

  std::shared_ptr<Communicator> comm =
      launched_by_mpi() ? must(make_mpi_communicator({.timeout_ms = o.timeout_ms}), "mpi")
                        : std::move(make_in_process_communicators(1).value().front());
  const bool speaks = comm->rank() == 0;
  if (speaks) {
    fmt::print(
        "| ranks | transport | tokens per rank | dispatch bytes per token | formula | us | "
        "MB/s | combine bytes per token | formula | us | MB/s |\n"
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
  }
  Bench bench(o, comm);
  for (const std::string& transport : o.transports) {
    for (const std::int64_t tokens : o.tokens) {
      const Point p = bench.run(transport, tokens);
      if (!speaks) continue;
      const auto rate = [&](double bytes, double us) {
        return bytes * static_cast<double>(tokens) / us;
      };
      fmt::print(
          "| {} | {} | {} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | {:.0f} | "
          "{:.0f} |\n",
          comm->size(), transport, tokens, p.bytes_dispatch, p.expect_dispatch, p.us_dispatch,
          rate(p.bytes_dispatch, p.us_dispatch), p.bytes_combine, p.expect_combine, p.us_combine,
          rate(p.bytes_combine, p.us_combine));
      std::fflush(stdout);
    }
  }
  return 0;
}
