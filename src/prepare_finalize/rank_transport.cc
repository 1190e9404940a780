#include "prepare_finalize/rank_transport.h"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "core/fault.h"
#include "cpu/tiers.h"
#include "permute/sort_slots.h"
#include "prepare_finalize/call_checks.h"

namespace moesaic::prepare_finalize {

Status RankTransport::check_options(const Communicator* communicator,
                                    const AllToAllOptions& options) {
  const auto invalid = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, std::move(text));
  };
  if (communicator == nullptr) return invalid("communicator: got none, need one");
  const int size = communicator->size();
  const std::int64_t most = ((std::int64_t{1} << 31) - 1) / size;
  if (options.max_tokens_per_rank < 1 || options.max_tokens_per_rank > most) {
    return invalid(fmt::format("max_tokens_per_rank: got {}, need 1 .. 2^31-1 / {} ranks",
                               options.max_tokens_per_rank, size));
  }
  if (!options.gather &&
      (options.parallel.ep_size != size || options.parallel.ep_rank != communicator->rank())) {
    return invalid(fmt::format("parallel: got ep rank {} of {}, the communicator has rank {} of {}",
                               options.parallel.ep_rank, options.parallel.ep_size,
                               communicator->rank(), size));
  }
  if (options.combine_dtype != DType::kF32 && options.combine_dtype != DType::kBF16) {
    return {StatusCode::kInvalidDType, fmt::format("combine_dtype: got {}, need F32 or BF16",
                                                   dtype_name(options.combine_dtype))};
  }
  return {};
}

Status RankTransport::check_slabs(const MoeProblem& problem, const AllToAllOptions& options,
                                  int ranks) {
  if (options.gather) {
    return {StatusCode::kUnsupported,
            "gather: got true, slabs of fixed capacity are for all-to-all"};
  }
  const std::int64_t all = options.max_tokens_per_rank * ranks;
  if (problem.max_tokens == all) return {};
  return {
      StatusCode::kInvalidArgument,
      fmt::format("max_tokens: got {} rows per slab, need max_tokens_per_rank {} x {} ranks = {}",
                  problem.max_tokens, options.max_tokens_per_rank, ranks, all)};
}

Result<ExpertDirectory> RankTransport::make_directory(const MoeProblem& problem,
                                                      const ParallelConfig& parallel, int ranks) {
  ExpertDirectory d;
  MOESAIC_ASSIGN_OR_RETURN(d.owner, expert_owners(problem.num_experts, parallel));
  d.num_local.assign(static_cast<std::size_t>(ranks), 0);
  d.local.reserve(d.owner.size());
  // Both placements number a rank's experts in ascending global order.
  for (const std::int32_t r : d.owner) {
    d.local.push_back(d.num_local[static_cast<std::size_t>(r)]++);
  }
  d.first_rank.push_back(0);
  for (const std::int32_t n : d.num_local) d.first_rank.push_back(d.first_rank.back() + n);
  d.by_rank.resize(d.owner.size());
  for (std::size_t e = 0; e < d.owner.size(); ++e) {
    const std::int64_t first = d.first_rank[static_cast<std::size_t>(d.owner[e])];
    d.by_rank[static_cast<std::size_t>(first + d.local[e])] = static_cast<std::int32_t>(e);
  }
  return d;
}

Status RankTransport::check_owned(const MoeProblem& problem, const ExpertDirectory& directory,
                                  int rank) {
  const std::int32_t mine = directory.num_local[static_cast<std::size_t>(rank)];
  if (problem.num_local_experts == mine) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("num_local_experts: got {}, parallel gives rank {} {}",
                      problem.num_local_experts, rank, mine)};
}

RankTransport::RankTransport(const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
                             const AllToAllOptions& options, std::string_view name, RowWire wire,
                             ExpertDirectory directory)
    : p_(problem),
      comm_(std::move(communicator)),
      max_tokens_(options.max_tokens_per_rank),
      ranks_(comm_->size()),
      combine_dtype_(options.combine_dtype),
      wire_(wire),
      directory_(std::move(directory)),
      kernels_(cpu::current_kernels().value()),  // RowWire::create has checked it
      // Ranks that send rows in different forms are in different calls.
      dispatch_{fmt::format("dispatch ({}, {})", name, dtype_name(wire.dtype())), "dispatch", {}},
      combine_{
          fmt::format("combine ({}, {})", name, dtype_name(options.combine_dtype)), "combine", {}} {
}

Status RankTransport::attach(const Experts& experts) {
  if (wire_.quantized() && !experts.takes_quantized_rows()) {
    return {StatusCode::kUnsupported,
            fmt::format("prepare_finalize {}: experts {} take no quantised rows, need "
                        "quantize_before_dispatch = false",
                        name(), experts.name())};
  }
  return attach_reduction(experts);
}

Result<std::int64_t> RankTransport::workspace_size(std::int64_t) const {
  // Others may have many rows when this rank has few: the size depends on the maximum alone.
  Arena arena = Arena::measure();
  carve_all(arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

Status RankTransport::out_of_memory(const char* step, const char* why) const {
  return {StatusCode::kOutOfMemory,
          comm_->abandon(fmt::format("{} of {}: {}", step, name(), why)).message()};
}

// An exchange and its buffers, which go back when it is over: several calls may be under way.
class RankTransport::Step {
 public:
  Step(Communicator& communicator, StepKind& kind)
      : kind_(kind), buffers_(take(kind)), exchange_(communicator, kind.name, *buffers_) {}
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() {
    try {
      kind_.spare.push_back(std::move(buffers_));
    } catch (const std::bad_alloc&) {  // the next step takes new ones
    }
  }
  RankExchange& exchange() { return exchange_; }

 private:
  static std::unique_ptr<ExchangeBuffers> take(StepKind& kind) {
    if (kind.spare.empty()) return std::make_unique<ExchangeBuffers>();
    std::unique_ptr<ExchangeBuffers> buffers = std::move(kind.spare.back());
    kind.spare.pop_back();
    return buffers;
  }

  StepKind& kind_;
  std::unique_ptr<ExchangeBuffers> buffers_;
  RankExchange exchange_;
};

class RankTransport::DispatchReceiver final : public PrepareReceiver {
 public:
  DispatchReceiver(const RankTransport& transport, const PrepareArgs& args)
      : t_(transport), args_(args), step_(*transport.comm_, transport.dispatch_) {}
  Status start() {
    t_.expect_dispatch(step_.exchange());
    return t_.send_rows(args_, step_.exchange());
  }
  Result<Prepared> receive() override {
    try {
      MOESAIC_RETURN_IF_ERROR(step_.exchange().receive());
      return t_.take_rows(args_, step_.exchange());
    } catch (const std::exception& error) {
      return t_.out_of_memory(t_.dispatch_.step, error.what());
    }
  }

 private:
  const RankTransport& t_;
  PrepareArgs args_;
  Step step_;
};

class RankTransport::CombineReceiver final : public FinalizeReceiver {
 public:
  CombineReceiver(const RankTransport& transport, const FinalizeArgs& args)
      : t_(transport), args_(args), step_(*transport.comm_, transport.combine_) {}
  Status start() {
    t_.expect_combine(step_.exchange());
    Status bad = check_finalize_args(t_.p_, args_);
    if (bad.ok()) bad = t_.check_tokens(args_.output.dim(0));
    if (!bad.ok()) return step_.exchange().refuse(bad);
    return t_.send_results(args_, step_.exchange());
  }
  Status receive() override {
    try {
      MOESAIC_RETURN_IF_ERROR(step_.exchange().receive());
      return t_.take_results(args_, step_.exchange());
    } catch (const std::exception& error) {
      return t_.out_of_memory(t_.combine_.step, error.what());
    }
  }

 private:
  const RankTransport& t_;
  FinalizeArgs args_;
  Step step_;
};

Result<std::unique_ptr<PrepareReceiver>> RankTransport::prepare_async(
    const PrepareArgs& args) const {
  try {
    auto receiver = std::make_unique<DispatchReceiver>(*this, args);
    MOESAIC_RETURN_IF_ERROR(receiver->start());
    return std::unique_ptr<PrepareReceiver>(std::move(receiver));
  } catch (const std::exception& error) {
    return out_of_memory(dispatch_.step, error.what());
  }
}

Result<std::unique_ptr<FinalizeReceiver>> RankTransport::finalize_async(
    const FinalizeArgs& args) const {
  try {
    auto receiver = std::make_unique<CombineReceiver>(*this, args);
    MOESAIC_RETURN_IF_ERROR(receiver->start());
    return std::unique_ptr<FinalizeReceiver>(std::move(receiver));
  } catch (const std::exception& error) {
    return out_of_memory(combine_.step, error.what());
  }
}

Result<Prepared> RankTransport::prepare(const PrepareArgs& args) const {
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<PrepareReceiver> started, prepare_async(args));
  return started->receive();
}

Status RankTransport::finalize(const FinalizeArgs& args) const {
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<FinalizeReceiver> started, finalize_async(args));
  return started->receive();
}

Status RankTransport::withdraw(const Status& reason, bool prepared, std::span<std::byte>) const {
  try {
    Step step(*comm_, prepared ? combine_ : dispatch_);
    prepared ? expect_combine(step.exchange()) : expect_dispatch(step.exchange());
    return step.exchange().refuse(reason);
  } catch (const std::exception& error) {
    static_cast<void>(out_of_memory("withdraw", error.what()));
    return reason;
  }
}

Status RankTransport::check_tokens(std::int64_t tokens) const {
  if (tokens <= max_tokens_) return {};
  return {StatusCode::kLimitExceeded,
          fmt::format("tokens: got {}, need at most {} per rank", tokens, max_tokens_)};
}

Status RankTransport::check_rows(const PrepareArgs& a) const {
  MOESAIC_RETURN_IF_ERROR(check_prepare_args(p_, a));
  const std::int64_t tokens = a.hidden_states.dim(0);
  MOESAIC_RETURN_IF_ERROR(check_tokens(tokens));
  MOESAIC_RETURN_IF_ERROR(permute::validate_topk_ids(
      {a.topk_ids.as<std::int32_t>(), static_cast<std::size_t>(tokens * p_.top_k)}, a.expert_map,
      p_.num_experts, p_.num_local_experts, p_.top_k));
  // Without owners rows go everywhere; without a map every expert is local.
  if (directory_.owner.empty() || MOESAIC_FAULT(all_to_all_takes_any_expert_map)) return {};
  for (std::size_t e = 0; e < a.expert_map.size(); ++e) {
    const std::int32_t need = directory_.owner[e] == comm_->rank() ? directory_.local[e] : -1;
    if (a.expert_map[e] == need) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("expert_map[{}]: got {}, need {}, as parallel spreads the experts", e,
                        a.expert_map[e], need)};
  }
  return {};
}

Status RankTransport::broken(std::string_view step, std::string_view what) const {
  return comm_->abandon(fmt::format("{} ({}): {}", step, name(), what));
}

void RankTransport::pack_result(const float* row, std::byte* to) const {
  kernels_->store_row(row, p_.hidden_size, combine_dtype_, to);
}

void RankTransport::add_result(const std::byte* row, float weight, float* scratch,
                               float* sum) const {
  const auto* values = reinterpret_cast<const float*>(row);
  if (combine_dtype_ != DType::kF32) {
    kernels_->load_row(row, combine_dtype_, p_.hidden_size, p_.hidden_size, scratch);
    values = scratch;
  }
  kernels_->accumulate_row(values, weight, p_.hidden_size, sum);
}

}  // namespace moesaic::prepare_finalize
