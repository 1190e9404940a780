// Rows travel to the ranks that own their experts, and one partial sum per row and rank travels
// back.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "core/fault.h"
#include "cpu/tiers.h"
#include "prepare_finalize/predicates.h"
#include "prepare_finalize/rank_transport.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/topk_weight_and_reduce.h"

namespace moesaic {
namespace {

class AllToAllPrepareFinalize final : public prepare_finalize::RankTransport {
 public:
  AllToAllPrepareFinalize(const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
                          const AllToAllOptions& options, prepare_finalize::RowWire wire,
                          prepare_finalize::ExpertDirectory directory)
      : prepare_finalize::RankTransport(problem, std::move(communicator), options,
                                        name_of(options.gather), wire, std::move(directory)),
        gather_(options.gather) {}

  static std::string_view name_of(bool gather) {
    return gather ? "all_gather_reduce_scatter" : "all_to_all";
  }
  std::string_view name() const override { return name_of(gather_); }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  std::int64_t max_dispatched_tokens(std::int64_t) const override { return ranks_ * max_tokens_; }

 private:
  struct Buffers {
    std::byte* packed = nullptr;          // [T] rows as they travel
    std::byte* hidden = nullptr;          // [R * T, H] of the wire's dtype
    float* scales = nullptr;              // [R * T, groups]
    float* weights = nullptr;             // [R * T, k]
    std::int32_t* ids = nullptr;          // [R * T, k]
    float* partial = nullptr;             // [R * T, H]
    float* sum = nullptr;                 // [T, H]
    float* scratch = nullptr;             // of the wire, or one row
    std::int64_t* received = nullptr;     // [R] rows from each rank
    std::int64_t* sent = nullptr;         // [R] rows to each rank
    std::int32_t* sent_tokens = nullptr;  // [R, T]
  };
  Buffers carve(Arena& arena) const {
    const std::int64_t rows = ranks_ * max_tokens_;
    Buffers b;
    b.received = arena.take<std::int64_t>(ranks_);
    b.sent = arena.take<std::int64_t>(ranks_);
    b.sent_tokens = arena.take<std::int32_t>(rows);
    b.packed = arena.take<std::byte>(max_tokens_ * row_bytes());
    b.hidden = arena.take<std::byte>(rows * wire_.hidden_bytes());
    b.scales = arena.take<float>(rows * wire_.groups());
    b.weights = arena.take<float>(rows * p_.top_k);
    b.ids = arena.take<std::int32_t>(rows * p_.top_k);
    b.partial = arena.take<float>(rows * p_.hidden_size);
    b.sum = arena.take<float>(max_tokens_ * p_.hidden_size);
    b.scratch = arena.take<float>(std::max(wire_.scratch_floats(), p_.hidden_size));
    return b;
  }
  void carve_all(Arena& arena) const override { static_cast<void>(carve(arena)); }

  Status attach_reduction(const Experts& experts) const override {
    if (experts.reduction() != TopKWeightAndReduce::kNaiveBatched) return {};
    return {StatusCode::kUnsupported,
            fmt::format("prepare_finalize {}: experts {} leave a batched reduction, need none, "
                        "contiguous or delegated",
                        name(), experts.name())};
  }
  void expect_dispatch(prepare_finalize::RankExchange& x) const override {
    for (int r = 0; r < ranks_; ++r) x.expect(r, max_tokens_ * row_bytes());
  }
  void expect_combine(prepare_finalize::RankExchange& x) const override {
    for (int r = 0; r < ranks_; ++r) x.expect(r, max_tokens_ * result_bytes());
  }

  // On the wire: hidden state (and scales), ids, weights.
  std::int64_t slot_bytes() const { return p_.top_k * static_cast<std::int64_t>(sizeof(float)); }
  std::int64_t row_bytes() const { return wire_.row_bytes() + 2 * slot_bytes(); }
  bool goes_to(const std::int32_t* ids, std::int64_t rank) const {
    const std::int64_t k = MOESAIC_FAULT(all_to_all_first_expert_only) ? 1 : p_.top_k;
    return std::any_of(ids, ids + k, [&](std::int32_t id) {
      return id >= 0 && directory_.owner[static_cast<std::size_t>(id)] == rank;
    });
  }
  void pack(const PrepareArgs& a, const Buffers& b) const {
    const auto n = static_cast<std::size_t>(slot_bytes());
    wire_.pack(a.hidden_states, a.topk_weights.as<float>(), b.scratch, b.packed, row_bytes());
    for (std::int64_t t = 0; t < a.hidden_states.dim(0); ++t) {
      std::byte* to = b.packed + t * row_bytes() + wire_.row_bytes();
      std::memcpy(to, a.topk_ids.as<std::int32_t>() + t * p_.top_k, n);
      std::memcpy(to + n, a.topk_weights.as<float>() + t * p_.top_k, n);
    }
  }
  void unpack(const std::byte* from, std::int64_t row, const Buffers& b) const {
    const auto take = [&from](void* to, std::int64_t bytes) {
      if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
      from += bytes;
    };
    take(b.hidden + row * wire_.hidden_bytes(), wire_.hidden_bytes());
    take(b.scales + row * wire_.groups(), wire_.row_bytes() - wire_.hidden_bytes());
    take(b.ids + row * p_.top_k, slot_bytes());
    take(b.weights + row * p_.top_k, slot_bytes());
  }

  Status send_rows(const PrepareArgs& a, prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    Status bad = arena.status();
    if (bad.ok()) bad = check_rows(a);
    if (!bad.ok()) return x.refuse(bad);
    pack(a, b);
    fill_messages(a, b, x);
    return x.send();
  }

  Result<Prepared> take_rows(const PrepareArgs& a,
                             const prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    // Rows in the order (source rank, token), so that the same input gives the same bits.
    std::int64_t rows = 0;
    for (int r = 0; r < ranks_; ++r) {
      const auto payload = x.payload(r);
      b.received[r] = x.rows(r);
      if (b.received[r] > max_tokens_ ||
          static_cast<std::int64_t>(payload.size()) != b.received[r] * row_bytes()) {
        return broken("dispatch", fmt::format("rank {} announced {} rows of {} bytes and sent {}",
                                              r, x.rows(r), row_bytes(), payload.size()));
      }
      for (std::int64_t i = 0; i < b.received[r]; ++i) {
        unpack(payload.data() + i * row_bytes(), rows++, b);
      }
    }
    Prepared prepared;
    prepared.hidden_states = ConstTensorView(b.hidden, wire_.dtype(), Shape{rows, p_.hidden_size});
    if (wire_.quantized()) {
      prepared.hidden_scale = ConstTensorView(reinterpret_cast<const std::byte*>(b.scales),
                                              DType::kF32, Shape{rows, wire_.groups()});
    }
    prepared.topk_ids = ConstTensorView(reinterpret_cast<const std::byte*>(b.ids), DType::kI32,
                                        Shape{rows, p_.top_k});
    prepared.topk_weights = ConstTensorView(reinterpret_cast<const std::byte*>(b.weights),
                                            DType::kF32, Shape{rows, p_.top_k});
    return prepared;
  }

  void fill_messages(const PrepareArgs& a, const Buffers& b,
                     prepare_finalize::RankExchange& x) const {
    const std::int64_t tokens = a.hidden_states.dim(0);
    const auto* ids = a.topk_ids.as<std::int32_t>();
    for (int r = 0; r < ranks_; ++r) {
      std::int32_t* chosen = b.sent_tokens + r * max_tokens_;
      b.sent[r] = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (gather_ || goes_to(ids + t * p_.top_k, r)) {
          chosen[b.sent[r]++] = static_cast<std::int32_t>(t);
        }
      }
      if (gather_) continue;
      std::byte* to = x.message(r, b.sent[r], b.sent[r] * row_bytes());
      for (std::int64_t i = 0; i < b.sent[r]; ++i, to += row_bytes()) {
        std::memcpy(to, b.packed + chosen[i] * row_bytes(), static_cast<std::size_t>(row_bytes()));
      }
    }
    if (!gather_) return;
    std::byte* to = x.to_all(tokens, tokens * row_bytes());
    if (tokens > 0) std::memcpy(to, b.packed, static_cast<std::size_t>(tokens * row_bytes()));
  }

  // One fp32 sum per received row, over this rank's experts.
  Status reduce_here(const FinalizeArgs& a, const Buffers& b) const {
    std::int64_t rows = 0;
    for (int r = 0; r < ranks_; ++r) rows += b.received[r];
    if (rows == 0) return {};
    const TensorView partial(reinterpret_cast<std::byte*>(b.partial), DType::kF32,
                             Shape{rows, p_.hidden_size});
    return a.reduction == TopKWeightAndReduce::kNoOp
               ? prepare_finalize::reduce_no_op(partial, a.expert_output)
               : prepare_finalize::reduce_contiguous(
                     partial, a.expert_output,
                     {b.weights, b.ids, a.expert_map, p_.top_k, a.apply_router_weight_on_input});
  }

  Status send_results(const FinalizeArgs& a, prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    Status bad = arena.status();
    if (bad.ok()) bad = reduce_here(a, b);
    if (!bad.ok()) return x.refuse(bad);
    const float* next = b.partial;
    for (int r = 0; r < ranks_; ++r) {
      std::byte* to = x.message(r, b.received[r], b.received[r] * result_bytes());
      for (std::int64_t i = 0; i < b.received[r]; ++i) {
        pack_result(next, to);
        next += p_.hidden_size;
        to += result_bytes();
      }
    }
    return x.send();
  }

  // Each row: partial sums in rank order, rounded once.
  Status take_results(const FinalizeArgs& a,
                      const prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    const cpu::ScopedIeeeMode ieee;
    const std::int64_t tokens = a.output.dim(0);
    std::fill(b.sum, b.sum + tokens * p_.hidden_size, 0.0F);
    for (int r = 0; r < ranks_; ++r) {
      const auto payload = x.payload(r);
      if (x.rows(r) != b.sent[r] ||
          static_cast<std::int64_t>(payload.size()) != b.sent[r] * result_bytes()) {
        return broken("combine", fmt::format("rank {} sent {} rows in {} bytes, need {} rows", r,
                                             x.rows(r), payload.size(), b.sent[r]));
      }
      if (MOESAIC_FAULT(all_to_all_forgets_last_rank) && r + 1 == ranks_ && r > 0) continue;
      for (std::int64_t i = 0; i < b.sent[r]; ++i) {
        add_result(payload.data() + i * result_bytes(), 1.0F, b.scratch,
                   b.sum + b.sent_tokens[r * max_tokens_ + i] * p_.hidden_size);
      }
    }
    kernels_->store_row(b.sum, tokens * p_.hidden_size, a.output.dtype, a.output.data);
    return {};
  }

  bool gather_;
};

}  // namespace

Result<std::unique_ptr<PrepareAndFinalize>> make_all_to_all_prepare_finalize(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options) {
  if (problem.device.is_cuda()) {
    return cuda::make_sm90_all_to_all(problem, std::move(communicator), options);
  }
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::standard_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_options(communicator.get(), options));
  prepare_finalize::ExpertDirectory
      directory;  // gathered rows go everywhere, whichever rank owns their experts
  if (!options.gather) {
    MOESAIC_ASSIGN_OR_RETURN(directory, prepare_finalize::RankTransport::make_directory(
                                            problem, options.parallel, communicator->size()));
    MOESAIC_RETURN_IF_ERROR(
        prepare_finalize::RankTransport::check_owned(problem, directory, communicator->rank()));
  }
  MOESAIC_ASSIGN_OR_RETURN(
      const prepare_finalize::RowWire wire,
      prepare_finalize::RowWire::create(problem, options.quantize_before_dispatch));
  std::unique_ptr<PrepareAndFinalize> pf(new (std::nothrow) AllToAllPrepareFinalize(
      problem, std::move(communicator), options, wire, std::move(directory)));
  if (!pf) return Status(StatusCode::kOutOfMemory, "cannot allocate prepare_finalize");
  return pf;
}

}  // namespace moesaic
