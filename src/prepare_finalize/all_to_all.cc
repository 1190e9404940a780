// Rows travel to the ranks that own their experts, and one partial sum per row and rank travels
// back.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "numerics/element.h"
#include "permute/sort_slots.h"
#include "prepare_finalize/predicates.h"
#include "prepare_finalize/topk_weight_and_reduce.h"
#include "quant/compute_scheme.h"

namespace moesaic {
namespace {

class AllToAllPrepareFinalize final : public PrepareAndFinalize {
 public:
  AllToAllPrepareFinalize(const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
                          std::vector<std::int32_t> owners, std::int64_t max_tokens, bool gather,
                          DType wire)
      : p_(problem),
        comm_(std::move(communicator)),
        owners_(std::move(owners)),
        max_tokens_(max_tokens),
        ranks_(comm_->size()),
        gather_(gather),
        wire_(wire) {}

  std::string_view name() const override {
    return gather_ ? "all_gather_reduce_scatter" : "all_to_all";
  }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Status attach(const Experts& experts) override {
    if (experts.reduction() != TopKWeightAndReduce::kNaiveBatched) return {};
    return {StatusCode::kUnsupported,
            fmt::format("prepare_finalize {}: experts {} leave a batched reduction, need none, "
                        "contiguous or delegated",
                        name(), experts.name())};
  }
  // Complete for the rows of this rank, as far as the communicator's ranks own the experts.
  bool output_is_reduced() const override { return true; }
  bool keeps_rows() const override { return false; }
  // Others may have many rows when this rank has few: sizes depend on the maximum alone.
  std::int64_t max_dispatched_tokens(std::int64_t) const override { return ranks_ * max_tokens_; }
  Result<std::int64_t> workspace_size(std::int64_t) const override {
    Arena arena = Arena::measure();
    const Buffers unused = carve(arena);
    static_cast<void>(unused);
    MOESAIC_RETURN_IF_ERROR(arena.status());
    return arena.used();
  }

  Result<Prepared> prepare(const PrepareArgs& a) const override {
    try {
      return dispatch(a);
    } catch (const std::exception& error) {
      return Status(StatusCode::kOutOfMemory, fmt::format("{}: {}", name(), error.what()));
    }
  }
  Status finalize(const FinalizeArgs& a) const override {
    try {
      return combine(a);
    } catch (const std::exception& error) {
      return {StatusCode::kOutOfMemory, fmt::format("{}: {}", name(), error.what())};
    }
  }

 private:
  using Out = std::span<const std::byte>;
  using In = std::span<std::byte>;

  struct Buffers {
    std::byte* hidden = nullptr;          // [R * T, H] of wire_
    float* weights = nullptr;             // [R * T, k]
    std::int32_t* ids = nullptr;          // [R * T, k]
    float* partial = nullptr;             // [R * T, H]
    std::int64_t* received = nullptr;     // [R] rows from each rank
    std::int64_t* sent = nullptr;         // [R] rows to each rank
    std::int32_t* sent_tokens = nullptr;  // [R, T]
  };
  Buffers carve(Arena& arena) const {
    const std::int64_t rows = ranks_ * max_tokens_;
    Buffers b;
    b.hidden = arena.take<std::byte>(rows * p_.hidden_size * wire_bytes());
    b.weights = arena.take<float>(rows * p_.top_k);
    b.ids = arena.take<std::int32_t>(rows * p_.top_k);
    b.partial = arena.take<float>(rows * p_.hidden_size);
    b.received = arena.take<std::int64_t>(ranks_);
    b.sent = arena.take<std::int64_t>(ranks_);
    b.sent_tokens = arena.take<std::int32_t>(rows);
    return b;
  }
  std::int64_t wire_bytes() const { return dtype_bits(wire_) / 8; }
  std::int64_t row_bytes() const {
    return p_.hidden_size * wire_bytes() + p_.top_k * static_cast<std::int64_t>(2 * sizeof(float));
  }
  bool goes_to(const std::int32_t* ids, std::int64_t rank) const {
    if (gather_) return true;
    const std::int64_t k = MOESAIC_FAULT(all_to_all_first_expert_only) ? 1 : p_.top_k;
    return std::any_of(ids, ids + k, [&](std::int32_t id) {
      return id >= 0 && owners_[static_cast<std::size_t>(id)] == rank;
    });
  }

  // A row on the wire: hidden state, ids, weights.
  void pack(const PrepareArgs& a, std::int64_t t, std::byte* to) const {
    const ConstTensorView& x = a.hidden_states;
    const std::int64_t from = t * x.strides[0];
    if (x.dtype == wire_) {
      std::memcpy(to, x.data + from * wire_bytes(),
                  static_cast<std::size_t>(p_.hidden_size * wire_bytes()));
    } else {
      for (std::int64_t i = 0; i < p_.hidden_size; ++i) {
        store_from_f32(to, wire_, i, load_as_f32(x.data, x.dtype, from + i));
      }
    }
    const auto k = static_cast<std::size_t>(p_.top_k);
    to += p_.hidden_size * wire_bytes();
    std::memcpy(to, a.topk_ids.as<std::int32_t>() + t * p_.top_k, k * sizeof(std::int32_t));
    std::memcpy(to + k * sizeof(std::int32_t), a.topk_weights.as<float>() + t * p_.top_k,
                k * sizeof(float));
  }
  void unpack(const std::byte* from, std::int64_t row, const Buffers& b) const {
    const std::int64_t bytes = p_.hidden_size * wire_bytes();
    const auto k = static_cast<std::size_t>(p_.top_k);
    std::memcpy(b.hidden + row * bytes, from, static_cast<std::size_t>(bytes));
    std::memcpy(b.ids + row * p_.top_k, from + bytes, k * sizeof(std::int32_t));
    std::memcpy(b.weights + row * p_.top_k,
                from + bytes + static_cast<std::int64_t>(k * sizeof(std::int32_t)),
                k * sizeof(float));
  }

  Result<Prepared> dispatch(const PrepareArgs& a) const {
    const std::int64_t tokens = a.hidden_states.dim(0);
    if (tokens > max_tokens_) {
      return Status(StatusCode::kLimitExceeded,
                    fmt::format("tokens: got {}, need at most {} per rank", tokens, max_tokens_));
    }
    const auto* ids = a.topk_ids.as<std::int32_t>();
    MOESAIC_RETURN_IF_ERROR(validate_topk_ids({ids, static_cast<std::size_t>(tokens * p_.top_k)},
                                              a.expert_map, p_.num_experts, p_.num_local_experts,
                                              p_.top_k));
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    MOESAIC_RETURN_IF_ERROR(arena.status());

    const auto n = static_cast<std::size_t>(ranks_);
    std::vector<std::vector<std::byte>> out(n), in(n);
    std::vector<Out> send;
    std::vector<In> recv;
    for (std::int64_t r = 0; r < ranks_; ++r) {
      std::vector<std::byte>& message = out[static_cast<std::size_t>(r)];
      b.sent[r] = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (!goes_to(ids + t * p_.top_k, r)) continue;
        message.resize(message.size() + static_cast<std::size_t>(row_bytes()));
        pack(a, t, message.data() + b.sent[r] * row_bytes());
        b.sent_tokens[r * max_tokens_ + b.sent[r]++] = static_cast<std::int32_t>(t);
      }
      send.emplace_back(message);
      in[static_cast<std::size_t>(r)].resize(static_cast<std::size_t>(max_tokens_ * row_bytes()));
      recv.emplace_back(in[static_cast<std::size_t>(r)]);
    }
    MOESAIC_RETURN_IF_ERROR(comm_->exchange("dispatch", send, recv, {b.received, n}));

    // Rows in the order (source rank, token), so that the same input gives the same bits.
    std::int64_t rows = 0;
    for (std::int64_t r = 0; r < ranks_; ++r) {
      if (b.received[r] % row_bytes() != 0) {
        return Status(StatusCode::kDevice,
                      fmt::format("dispatch: rank {} sent {} bytes, need a multiple of {}", r,
                                  b.received[r], row_bytes()));
      }
      b.received[r] /= row_bytes();
      for (std::int64_t i = 0; i < b.received[r]; ++i) {
        unpack(in[static_cast<std::size_t>(r)].data() + i * row_bytes(), rows++, b);
      }
    }
    Prepared prepared;
    prepared.hidden_states = ConstTensorView(b.hidden, wire_, Shape{rows, p_.hidden_size});
    prepared.topk_ids = ConstTensorView(reinterpret_cast<const std::byte*>(b.ids), DType::kI32,
                                        Shape{rows, p_.top_k});
    prepared.topk_weights = ConstTensorView(reinterpret_cast<const std::byte*>(b.weights),
                                            DType::kF32, Shape{rows, p_.top_k});
    return prepared;
  }

  Status combine(const FinalizeArgs& a) const {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    MOESAIC_RETURN_IF_ERROR(arena.status());
    std::int64_t rows = 0;
    for (std::int64_t r = 0; r < ranks_; ++r) rows += b.received[r];
    if (rows > 0) {
      const TensorView partial(reinterpret_cast<std::byte*>(b.partial), DType::kF32,
                               Shape{rows, p_.hidden_size});
      MOESAIC_RETURN_IF_ERROR(a.reduction == TopKWeightAndReduce::kNoOp
                                  ? reduce_no_op(partial, a.expert_output)
                                  : reduce_contiguous(partial, a.expert_output,
                                                      {b.weights, b.ids, a.expert_map, p_.top_k,
                                                       a.apply_router_weight_on_input}));
    }
    const auto n = static_cast<std::size_t>(ranks_);
    std::vector<std::vector<float>> in(n);
    std::vector<Out> send;
    std::vector<In> recv;
    const float* next = b.partial;
    for (std::int64_t r = 0; r < ranks_; ++r) {
      const std::int64_t count = b.received[r] * p_.hidden_size;
      send.push_back(std::as_bytes(std::span(next, static_cast<std::size_t>(count))));
      next += count;
      std::vector<float>& rows_back = in[static_cast<std::size_t>(r)];
      rows_back.resize(static_cast<std::size_t>(b.sent[r] * p_.hidden_size));
      recv.push_back(std::as_writable_bytes(std::span(rows_back)));
    }
    MOESAIC_RETURN_IF_ERROR(comm_->exchange("combine", send, recv));

    // Each row: partial sums in rank order, rounded once.
    const std::int64_t tokens = a.output.dim(0);
    std::vector<float> sum(static_cast<std::size_t>(tokens * p_.hidden_size), 0.0F);
    for (std::int64_t r = 0; r < ranks_; ++r) {
      if (MOESAIC_FAULT(all_to_all_forgets_last_rank) && r + 1 == ranks_ && r > 0) continue;
      const float* from = in[static_cast<std::size_t>(r)].data();
      for (std::int64_t i = 0; i < b.sent[r]; ++i, from += p_.hidden_size) {
        float* to = sum.data() + b.sent_tokens[r * max_tokens_ + i] * p_.hidden_size;
        for (std::int64_t h = 0; h < p_.hidden_size; ++h) to[h] += from[h];
      }
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      store_from_f32(a.output.data, a.output.dtype, static_cast<std::int64_t>(i), sum[i]);
    }
    return {};
  }

  MoeProblem p_;
  std::shared_ptr<Communicator> comm_;
  std::vector<std::int32_t> owners_;
  std::int64_t max_tokens_;
  std::int64_t ranks_;
  bool gather_;
  DType wire_;
};

}  // namespace

Result<std::unique_ptr<PrepareAndFinalize>> make_all_to_all_prepare_finalize(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options) {
  MOESAIC_RETURN_IF_ERROR(local_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  if (!communicator) {
    return Status(StatusCode::kInvalidArgument, "communicator: got none, need one");
  }
  if (options.max_tokens_per_rank < 1 ||
      options.max_tokens_per_rank > ((std::int64_t{1} << 31) - 1) / communicator->size()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("max_tokens_per_rank: got {}, need 1 .. 2^31-1 / {} ranks",
                              options.max_tokens_per_rank, communicator->size()));
  }
  if (!options.gather && (options.parallel.ep_size != communicator->size() ||
                          options.parallel.ep_rank != communicator->rank())) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("parallel: got ep rank {} of {}, the communicator has rank {} of {}",
                              options.parallel.ep_rank, options.parallel.ep_size,
                              communicator->rank(), communicator->size()));
  }
  MOESAIC_ASSIGN_OR_RETURN(std::vector<std::int32_t> owners,
                           expert_owners(problem.num_experts, options.parallel));
  MOESAIC_ASSIGN_OR_RETURN(const ComputeScheme scheme, compute_scheme(problem.quant));
  const DType wire = operand_dtype(problem.activation_dtype, scheme);
  std::unique_ptr<PrepareAndFinalize> pf(new (std::nothrow) AllToAllPrepareFinalize(
      problem, std::move(communicator), std::move(owners), options.max_tokens_per_rank,
      options.gather, wire));
  if (!pf) return Status(StatusCode::kOutOfMemory, "cannot allocate prepare_finalize");
  return pf;
}

}  // namespace moesaic
