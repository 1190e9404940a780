#include "rank_cli.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "core/fault.h"
#include "cpu/tiers.h"
#include "moesaic/parallel.h"
#include "rank_effects.h"

namespace moesaic::tool {
namespace {

// Ranks as threads that are useful to try things out on any machine.
constexpr int kMaxThreadRanks = 64;

int from_launcher(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names) {
    if (const char* text = std::getenv(name)) return std::atoi(text);
  }
  return otherwise;
}
Status check_launched(const RankOptions& options, int size) {
  if (options.ranks == 0 || options.ranks == size) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("--ranks: got {}, mpirun started {} processes; need the same number, or none",
                      options.ranks, size)};
}

int launched_size() { return from_launcher({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 1); }

// "cuda": a GPU of its own for each rank of a host, messages through NCCL. "cuda:N": all ranks on
// that GPU, messages through host memory. "" or "cpu": the CPU.
Result<Device> device_of_rank(const CommonOptions& common, int rank) {
  if (common.device.empty()) return Device::cpu();
  if (common.device != "cuda") {
    MOESAIC_ASSIGN_OR_RETURN(const Device device, parse_device(common.device));
    MOESAIC_RETURN_IF_ERROR(check_device(device).with_context("--device"));
    return device;
  }
  const int local = launched_by_mpi()
                        ? from_launcher({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}, rank)
                        : rank;
  std::vector<int> usable;
  const CudaInfo info = query_cuda();
  for (const CudaDeviceInfo& d : info.devices) {
    if (d.available) usable.push_back(d.index);
  }
  if (local < static_cast<int>(usable.size())) {
    return Device::cuda(usable[static_cast<std::size_t>(local)]);
  }
  return Status(
      StatusCode::kUnsupported,
      usable.empty()
          ? fmt::format("--device cuda: {}; need cpu", info.reason)
          : fmt::format("--device cuda: rank {} finds {} usable GPU(s), need one for each "
                        "rank of a host, or cuda:N for all ranks on one",
                        rank, usable.size()));
}

template <class Enum>
Enum by_name(const std::string& name, std::initializer_list<Enum> values,
             std::string_view (*name_of)(Enum)) {
  for (const Enum e : values) {
    if (name_of(e) == name) return e;
  }
  return *values.begin();  // the command line has checked the names
}

// All but the device.
Result<FusedMoE::Options> layer_options_of(const RankOptions& o, const CommonOptions& common,
                                           int rank, int size, int threads) {
  if (size % o.tp != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--tp: got {}, need a divisor of the {} ranks", o.tp, size));
  }
  ParallelSizes sizes;
  sizes.tp_size = o.tp;
  sizes.tp_rank = rank % o.tp;
  sizes.dp_size = size / o.tp;
  sizes.dp_rank = rank / o.tp;
  sizes.enable_expert_parallel = o.ep;
  sizes.sequence_parallel = o.sp;
  FusedMoE::Options layer = layer_options(common, 1);
  MOESAIC_ASSIGN_OR_RETURN(layer.parallel, ParallelConfig::from_sizes(sizes));
  layer.parallel.placement =
      by_name(o.placement, {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin},
              &expert_placement_name);
  layer.ranks.transport =
      by_name(o.transport,
              {RankTransport::kAuto, RankTransport::kNone, RankTransport::kGather,
               RankTransport::kAllToAll, RankTransport::kBatched},
              &rank_transport_name);
  layer.ranks.engine =
      by_name(o.engine, {RankEngine::kMessages, RankEngine::kPeerWindows, RankEngine::kAuto},
              &rank_engine_name);
  layer.ranks.peer_memory =
      by_name(o.peer_memory, {PeerMemory::kAuto, PeerMemory::kCudaHandles, PeerMemory::kNccl},
              &peer_memory_name);
  if (!o.reduction.empty()) {
    layer.ranks.reduction = by_name(o.reduction, {RankReduction::kPerRank, RankReduction::kPerSlot},
                                    &rank_reduction_name);
  }
  layer.ranks.combine_dtype = o.combine_dtype == "bf16" ? DType::kBF16 : DType::kF32;
  layer.ranks.cut_shared = o.cut_shared;
  layer.ranks.dual_batch_tokens = o.dual_batch_tokens;
  layer.ranks.pair_capacity = o.pair_capacity;
  layer.num_threads = threads;
  layer.ranks.enable_eplb = o.eplb;
  layer.ranks.num_redundant_experts = o.redundant;
  return layer;
}

// Of ranks that share the cores.
int threads_of_rank(const CommonOptions& common, int ranks) {
  return common.threads > 0 ? common.threads : std::max(1, cpu::resolve_threads(0) / ranks);
}

int timeout_ms(const RankOptions& options) { return static_cast<int>(options.timeout_s * 1000); }

int run_one(const RankOptions& options, const CommonOptions& common, int threads,
            std::shared_ptr<Communicator> communicator, std::shared_ptr<RankFailures> failures,
            const std::function<int(const RankContext&)>& body) {
  RankContext c;
  c.failures = std::move(failures);
  c.asked = options;
  c.rank = communicator->rank();
  c.size = communicator->size();
  set_log_rank(c.rank);
  c.console = common.console(/*results=*/c.rank == 0);
  c.communicator = std::move(communicator);
  Result<FusedMoE::Options> layer = layer_options_of(options, common, c.rank, c.size, threads);
  if (!layer.ok()) return c.fail(layer.status(), Origin::kOption);
  c.layer = std::move(layer).value();
  const Result<Device> device = device_of_rank(common, c.rank);
  if (!device.ok()) return c.fail(device.status(), Origin::kOption);
  c.layer.device = *device;
  c.shares_device = device->is_cuda() ? common.device != "cuda" : !launched_by_mpi();
  if (common.device == "cuda") {
    CommunicatorOptions wait;
    wait.timeout_ms = timeout_ms(options);
    auto nccl = make_nccl_communicator(c.communicator, c.layer.device.index(), wait);
    if (!nccl.ok()) return c.fail(nccl.status(), Origin::kOption);
    c.communicator = std::move(nccl).value();
  }
  c.layer.ranks.communicator = c.communicator;
  c.console.note(
      1,
      fmt::format("{} of {} ranks over {} on {}, tp {} of {}, dp {} of {}, {} thread(s)", c.rank,
                  c.size, c.communicator->name(), c.layer.device.to_string(), c.rank % options.tp,
                  options.tp, c.rank / options.tp, c.size / options.tp, threads));
  // What is thrown here would leave the others waiting for this rank.
  try {
    return body(c);
  } catch (const std::bad_alloc&) {
    return c.fail({StatusCode::kOutOfMemory, "the allocator refused"}, Origin::kOption);
  } catch (const std::exception& error) {
    return c.fail({StatusCode::kInternal, error.what()}, Origin::kOption);
  }
}

}  // namespace

void add_rank_options(CLI::App& app, RankOptions& o) {
  const char* group = "Ranks";
  app.add_option("--ranks", o.ranks,
                 "Spread the layer over this many ranks: the processes of mpirun, else threads. On "
                 "the CPU; with --device cuda a GPU for each (NCCL), with cuda:N all on one")
      ->check(whole_number(1, 4096))
      ->group(group);
  app.add_option("--tp", o.tp,
                 "Ranks of an engine, which have the same rows; ranks / tp engines have rows of "
                 "their own (data parallelism)")
      ->check(whole_number(1, 4096))
      ->capture_default_str()
      ->group(group);
  app.add_flag("--ep,!--no-ep", o.ep,
               "Whole experts on each rank (default); --no-ep: a slice of every expert")
      ->group(group);
  app.add_flag("--sp", o.sp, "Sequence parallelism: the ranks of an engine share its rows")
      ->group(group);
  app.add_option("--placement", o.placement, "Which rank owns which expert")
      ->check(one_of({"linear", "round_robin"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--transport", o.transport, "How rows reach experts of other ranks")
      ->check(one_of({"auto", "none", "gather", "all_to_all", "batched"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--rank-engine", o.engine,
                 "How rows travel between GPUs: messages, or (one host, each rank its own rows, "
                 "CUDA_MODULE_LOADING=EAGER) peer_windows, where no rank waits on the host; auto: "
                 "windows where that can be")
      ->check(one_of({"messages", "peer_windows", "auto"}))
      ->capture_default_str()
      ->group(group);
  app.add_option(
         "--peer-memory", o.peer_memory,
         "Peer windows: where GPUs' memory for each other is from: cuda_handles (processes), "
         "nccl (libnccl.so.2 from 2.28.3 on, a GPU for each rank); auto: threads need "
         "neither, processes take nccl where some rank has no handles")
      ->check(one_of({"auto", "cuda_handles", "nccl"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--reduction", o.reduction,
                 "Order of a row's sum: per_rank (fewest bytes; default) or per_slot (the bits of "
                 "one rank; default with load balancing)")
      ->check(one_of({"per_rank", "per_slot"}))
      ->group(group);
  app.add_option(
         "--combine-dtype", o.combine_dtype,
         "dtype of partial sums on their way back (gather, all_to_all): bf16 is half the bytes "
         "and one more rounding")
      ->check(one_of({"f32", "bf16"}))
      ->capture_default_str()
      ->group(group);
  app.add_flag(
         "--cut-shared", o.cut_shared,
         "Shared experts in slices, one for each rank with the same rows, instead of whole on "
         "every rank (transports none and gather)")
      ->group(group);
  app.add_option("--dual-batch-tokens", o.dual_batch_tokens,
                 "From this many tokens of a rank on two halves of a call are under way at once: "
                 "rows travel while experts work; 0: never")
      ->check(whole_number(std::int64_t{0}, std::int64_t{1} << 31))
      ->capture_default_str()
      ->group(group);
  app.add_option(
         "--pair-capacity", o.pair_capacity,
         "Peer windows: pairs of a row and an expert that a rank may compute in one call, and "
         "has memory for; a call with more is refused on all ranks; 0: room for every pair")
      ->check(whole_number(std::int64_t{0}, std::int64_t{1} << 31))
      ->capture_default_str()
      ->group(group);
  app.add_option("--timeout", o.timeout_s, "Seconds until a rank that does not answer is lost")
      ->check(number(0.1, 86400.0))
      ->capture_default_str()
      ->group(group);
}

void add_balance_options(CLI::App& app, RankOptions& o) {
  const char* group = "Ranks";
  CLI::Option* eplb = app.add_flag(
      "--eplb", o.eplb,
      "Expert load balancing: measure the load, move experts between the ranks while the layer "
      "serves, and show that no bit of the output changes (CPU, whole experts; with --reduction "
      "per_rank sums change their order)");
  eplb->group(group);
  app.add_option("--redundant", o.redundant, "Slots beyond one per expert, for copies")
      ->check(whole_number(std::int64_t{0}, std::int64_t{1} << 20))
      ->needs(eplb)
      ->capture_default_str()
      ->group(group);
}

bool wants_ranks(const RankOptions& options) {
  return options.ranks > 1 || (launched_by_mpi() && launched_size() > 1);
}

Status check_rank_options(const RankOptions& o) {
  if (wants_ranks(o)) return check_rank_effects(o);
  if (MOESAIC_FAULT(cli_rank_options_of_one_rank)) return {};
  const RankOptions usual;
  if (o.ranks == 1 || launched_by_mpi()) {  // a world of one, in which most mean nothing
    if (o.eplb) {
      return {StatusCode::kInvalidArgument,
              "--eplb: got it with 1 rank, need 2 or more between which experts move"};
    }
    if (o.tp == usual.tp) return {};
    return {StatusCode::kInvalidArgument,
            fmt::format("--tp: got {}, need a divisor of the 1 ranks", o.tp)};
  }
  const std::pair<const char*, bool> given[] = {
      {"--tp", o.tp != usual.tp},
      {"--no-ep", o.ep != usual.ep},
      {"--sp", o.sp != usual.sp},
      {"--placement", o.placement != usual.placement},
      {"--transport", o.transport != usual.transport},
      {"--combine-dtype", o.combine_dtype != usual.combine_dtype},
      {"--rank-engine", o.engine != usual.engine},
      {"--peer-memory", o.peer_memory != usual.peer_memory},
      {"--reduction", o.reduction != usual.reduction},
      {"--cut-shared", o.cut_shared != usual.cut_shared},
      {"--dual-batch-tokens", o.dual_batch_tokens != usual.dual_batch_tokens},
      {"--pair-capacity", o.pair_capacity != usual.pair_capacity},
      {"--timeout", o.timeout_s != usual.timeout_s},
      {"--eplb", o.eplb != usual.eplb},
  };
  for (const auto& [option, is_given] : given) {
    if (!is_given) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got it without --ranks, need the number of ranks", option)};
  }
  return {};
}

bool speaks_for_all() { return from_launcher({"OMPI_COMM_WORLD_RANK", "PMI_RANK"}, 0) == 0; }

Result<FusedMoE::Options> explained_options(RankOptions& options, const CommonOptions& common,
                                            std::int64_t max_tokens) {
  MOESAIC_RETURN_IF_ERROR(check_rank_options(options));
  if (options.timeout_s != RankOptions().timeout_s && !MOESAIC_FAULT(cli_explain_waits)) {
    return Status(StatusCode::kInvalidArgument,
                  "--timeout: got it with explain, which waits for no rank; need run or bench");
  }
  if (launched_size() > 1 && !MOESAIC_FAULT(cli_explains_one_rank_of_mpirun)) {
    MOESAIC_RETURN_IF_ERROR(check_launched(options, launched_size()));
    options.ranks = launched_size();
  }
  if (options.ranks <= 1) return layer_options(common, max_tokens);
  MOESAIC_ASSIGN_OR_RETURN(
      FusedMoE::Options layer,
      layer_options_of(options, common, 0, options.ranks, threads_of_rank(common, options.ranks)));
  // Without --device ranks compute on the CPU.
  layer.device = common.device.empty() ? Device::cpu() : chosen_device(common);
  layer.max_tokens = max_tokens;
  MOESAIC_ASSIGN_OR_RETURN(auto ranks, make_in_process_communicators(options.ranks));
  layer.ranks.communicator = std::move(ranks.front());
  return layer;
}

RankContext::Rows RankContext::rows(std::int64_t tokens, int of_rank) const {
  const int tp = layer.parallel.engine_tp_size();
  const std::int64_t engines = size / tp;
  const std::int64_t engine = of_rank / tp;
  const std::int64_t begin = tokens * engine / engines;
  const std::int64_t end = tokens * (engine + 1) / engines;
  if (!layer.parallel.is_sequence_parallel()) return {begin, end - begin, of_rank % tp == 0};
  const std::int64_t each = (end - begin + tp - 1) / tp;
  const std::int64_t first = std::min(begin + each * (of_rank % tp), end);
  return {first, std::min(each, end - first), true};
}

int RankContext::fail(const Status& status, Origin origin) const {
  // Before the others learn it, so that theirs come behind.
  if (failures) {
    const std::lock_guard lock(failures->mutex);
    failures->all.push_back({rank, status, origin});
  }
  if (communicator->state().ok()) static_cast<void>(communicator->abandon(status.message()));
  return failures ? exit_code(status.code(), origin) : console.fail(status, origin);
}

namespace {

// The first failure is the cause, of which the others are told: it alone is reported, and by its
// rank's name unless all ranks say the same.
int report_failures(const RankFailures& failures, std::size_t ranks, const CommonOptions& common) {
  const std::vector<RankFailures::Failure>& all = failures.all;
  const RankFailures::Failure& cause = all.front();
  const bool same = std::all_of(all.begin(), all.end(), [&](const RankFailures::Failure& f) {
    return f.status.code() == cause.status.code() && f.status.message() == cause.status.message();
  });
  const Console console = common.console();
  if (all.size() == ranks && same) return console.fail(cause.status, cause.origin);
  for (const RankFailures::Failure& f : all) {
    set_log_rank(f.rank);
    if (&f != &cause) console.note(1, f.status.to_string());
  }
  set_log_rank(cause.rank);
  return console.fail(cause.status, cause.origin);
}

}  // namespace

int run_on_ranks(const RankOptions& options, const CommonOptions& common,
                 const std::function<int(const RankContext&)>& body) {
  const Console console = common.console();
  CommunicatorOptions communicator;
  communicator.timeout_ms = timeout_ms(options);
  const int cores = cpu::resolve_threads(0);
  if (launched_by_mpi()) {
    auto mine = make_mpi_communicator(communicator);
    if (!mine.ok()) return console.fail(mine.status(), Origin::kOption);
    const int size = (*mine)->size();
    if (const Status same = check_launched(options, size); !same.ok()) {
      return console.fail(same, Origin::kOption);
    }
    // The processes of one machine share its cores.
    const int threads = threads_of_rank(common, size);
    return run_one(options, common, threads, std::move(*mine), nullptr, body);
  }
  // Threads that share a core take turns waiting for each other, and every collective is a message
  // from each rank to each: hundreds of them on a few cores would be minutes of that.
  const int most = std::max(kMaxThreadRanks, 4 * cores);
  if (options.ranks > most && !MOESAIC_FAULT(ranks_without_a_limit)) {
    return console.fail(
        {StatusCode::kInvalidArgument,
         fmt::format("--ranks: got {}, need at most {} threads on {} core(s); more ranks are for "
                     "processes of mpirun on more machines",
                     options.ranks, most, cores)},
        Origin::kOption);
  }
  auto ranks = make_in_process_communicators(options.ranks, communicator);
  if (!ranks.ok()) return console.fail(ranks.status(), Origin::kOption);
  const int threads = threads_of_rank(common, options.ranks);
  std::vector<int> codes(ranks->size(), kExitInternal);
  std::vector<std::thread> team;
  const auto failures = std::make_shared<RankFailures>();
  const auto failed = [&](std::size_t r, const Status& status) {
    const std::lock_guard lock(failures->mutex);
    failures->all.push_back({static_cast<int>(r), status, Origin::kOption});
  };
  const auto rank = [&](std::size_t r) {
    try {
      codes[r] = run_one(options, common, threads,
                         std::shared_ptr<Communicator>(std::move((*ranks)[r])), failures, body);
    } catch (const std::exception& error) {
      failed(r, {StatusCode::kInternal, error.what()});
    }
  };
  for (std::size_t r = 0; r < ranks->size(); ++r) {
    try {
      team.emplace_back(rank, r);
    } catch (const std::system_error& error) {  // the others learn it instead of waiting
      const std::string why = fmt::format("rank {}: no thread: {}", r, error.what());
      failed(r, {StatusCode::kOutOfMemory, why});
      static_cast<void>((*ranks)[r]->abandon(why));
      break;
    }
  }
  for (std::thread& t : team) t.join();
  if (!failures->all.empty()) return report_failures(*failures, ranks->size(), common);
  return codes[0] != kExitOk ? codes[0] : *std::max_element(codes.begin(), codes.end());
}

Json describe_ranks(const RankContext& c, const FusedMoE& layer) {
  const ParallelConfig& p = c.layer.parallel;
  return {{"ranks", c.size},
          {"communicator", c.communicator->name()},
          {"tp", p.engine_tp_size()},
          {"dp", p.dp_size},
          {"ep", p.ep_size > 1},
          {"sp", p.is_sequence_parallel()},
          // What is in force: round robin may have become linear.
          {"placement", expert_placement_name(layer.parallel().placement)},
          {"transport", rank_transport_name(layer.transport())},
          {"engine", rank_engine_name(c.layer.ranks.engine)},
          {"peer_memory", peer_memory_name(c.layer.ranks.peer_memory)},
          {"reduction", rank_reduction_name(c.layer.ranks.reduction_in_force())},
          {"combine_dtype", c.layer.ranks.combine_dtype == DType::kBF16 ? "bf16" : "f32"},
          {"cut_shared", c.layer.ranks.cut_shared},
          {"dual_batch_tokens", c.layer.ranks.dual_batch_tokens},
          {"pair_capacity", c.layer.ranks.pair_capacity}};
}

}  // namespace moesaic::tool
