// Low latency: one message each way, into slabs of fixed capacity. A row travels once for each of
// its experts (times its weight where that acts on the input), needs neither ids nor weights there,
// and its k results are weighted and added up where it came from, in slot order, as one rank alone
// would do it.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "core/checked.h"
#include "core/fault.h"
#include "cpu/tiers.h"
#include "prepare_finalize/predicates.h"
#include "prepare_finalize/rank_transport.h"

namespace moesaic {
namespace {

class BatchedAllToAllPrepareFinalize final : public prepare_finalize::RankTransport {
 public:
  BatchedAllToAllPrepareFinalize(const MoeProblem& problem,
                                 std::shared_ptr<Communicator> communicator,
                                 const AllToAllOptions& options, prepare_finalize::RowWire wire,
                                 prepare_finalize::ExpertDirectory directory)
      : prepare_finalize::RankTransport(problem, std::move(communicator), options,
                                        "all_to_all_batched", wire, std::move(directory)) {}

  std::string_view name() const override { return "all_to_all_batched"; }
  ActivationFormat format() const override { return ActivationFormat::kBatched; }
  std::int64_t max_dispatched_tokens(std::int64_t) const override { return p_.max_tokens; }

 private:
  struct Buffers {
    std::int32_t* sent = nullptr;      // [E] rows of this rank to each expert
    std::int32_t* received = nullptr;  // [R, E_l] rows from each rank to each local expert
    std::int32_t* counts = nullptr;    // [E_l] their sum
    std::int32_t* slot_row = nullptr;  // [T, k] place among this rank's rows for that expert
    std::int64_t* first = nullptr;     // [E] first row of an expert in its rank's message
    std::byte* packed = nullptr;       // [T, rows_per_token()] rows as they travel
    std::byte* hidden = nullptr;       // [E_l, R * T, H] of the wire's dtype
    float* scales = nullptr;           // [E_l, R * T, groups]
    float* scratch = nullptr;          // of the wire, or two rows
  };
  Buffers carve(Arena& arena) const {
    const std::int64_t slab_rows = p_.num_local_experts * p_.max_tokens;
    Buffers b;
    b.sent = arena.take<std::int32_t>(p_.num_experts);
    b.received = arena.take<std::int32_t>(ranks_ * p_.num_local_experts);
    b.counts = arena.take<std::int32_t>(p_.num_local_experts);
    b.slot_row = arena.take<std::int32_t>(max_tokens_ * p_.top_k);
    b.first = arena.take<std::int64_t>(p_.num_experts);
    b.packed = arena.take<std::byte>(max_tokens_ * wire_.rows_per_token() * wire_.row_bytes());
    b.hidden = arena.take<std::byte>(slab_rows * wire_.hidden_bytes());
    b.scales = arena.take<float>(slab_rows * wire_.groups());
    b.scratch = arena.take<float>(std::max(wire_.scratch_floats(), 2 * p_.hidden_size));
    return b;
  }
  void carve_all(Arena& arena) const override { static_cast<void>(carve(arena)); }

  Status attach_reduction(const Experts& experts) const override {
    const TopKWeightAndReduce r = experts.reduction();
    if (r == TopKWeightAndReduce::kDelegate || r == TopKWeightAndReduce::kNaiveBatched) return {};
    return {StatusCode::kUnsupported,
            fmt::format("prepare_finalize {}: experts {} do not leave a batched or delegated "
                        "reduction",
                        name(), experts.name())};
  }

  // Rows that a rank with T tokens can send to one that owns `experts`.
  std::int64_t most_rows(std::int64_t experts) const {
    return max_tokens_ * std::min(p_.top_k, experts);
  }
  static std::int64_t count_bytes(std::int64_t experts) {
    return experts * static_cast<std::int64_t>(sizeof(std::int32_t));
  }
  std::int64_t experts_of(int r) const { return directory_.num_local[static_cast<std::size_t>(r)]; }
  std::span<const std::int32_t> ids_of(int r) const {
    const auto first = static_cast<std::size_t>(directory_.first_rank[static_cast<std::size_t>(r)]);
    return std::span(directory_.by_rank).subspan(first, static_cast<std::size_t>(experts_of(r)));
  }
  void expect_dispatch(prepare_finalize::RankExchange& x) const override {
    const std::int64_t mine = p_.num_local_experts;
    for (int r = 0; r < ranks_; ++r) {
      x.expect(r, count_bytes(mine) + most_rows(mine) * wire_.row_bytes());
    }
  }
  void expect_combine(prepare_finalize::RankExchange& x) const override {
    for (int r = 0; r < ranks_; ++r) x.expect(r, most_rows(experts_of(r)) * result_bytes());
  }

  // Counts the rows for each expert and gives each slot its place among them.
  Status place_slots(const PrepareArgs& a, const Buffers& b) const {
    const std::int64_t tokens = a.hidden_states.dim(0);
    const auto* ids = a.topk_ids.as<std::int32_t>();
    std::fill(b.sent, b.sent + p_.num_experts, 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        const std::int32_t e = ids[t * p_.top_k + j];
        if (e < 0) continue;
        if (std::find(ids + t * p_.top_k, ids + t * p_.top_k + j, e) != ids + t * p_.top_k + j) {
          return {StatusCode::kInvalidArgument,
                  fmt::format("topk_ids: token {}: got expert {} twice, slabs of fixed capacity "
                              "need distinct experts",
                              t, e)};
        }
        b.slot_row[t * p_.top_k + j] = b.sent[e]++;
      }
    }
    for (int r = 0; r < ranks_; ++r) {
      std::int64_t first = 0;
      for (const std::int32_t e : ids_of(r)) {
        b.first[e] = first;
        first += b.sent[e];
      }
    }
    return {};
  }

  Status send_rows(const PrepareArgs& a, prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    Status bad = arena.status();
    if (bad.ok()) bad = check_rows(a);
    if (bad.ok()) bad = place_slots(a, b);
    if (!bad.ok()) return x.refuse(bad);
    wire_.pack(a.hidden_states, a.topk_weights.as<float>(), b.scratch, b.packed, wire_.row_bytes());
    fill_messages(a, b, x);
    return x.send();
  }

  Result<Prepared> take_rows(const PrepareArgs& a,
                             const prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    std::fill(b.counts, b.counts + p_.num_local_experts, 0);
    for (int r = 0; r < ranks_; ++r) MOESAIC_RETURN_IF_ERROR(fill_slabs(r, b, x));

    const std::int64_t slabs = p_.num_local_experts;
    Prepared prepared;
    prepared.hidden_states =
        ConstTensorView(b.hidden, wire_.dtype(), Shape{slabs, p_.max_tokens, p_.hidden_size});
    if (wire_.quantized()) {
      prepared.hidden_scale =
          ConstTensorView(reinterpret_cast<const std::byte*>(b.scales), DType::kF32,
                          Shape{slabs, p_.max_tokens, wire_.groups()});
    }
    prepared.expert_num_tokens = {b.counts, static_cast<std::size_t>(slabs)};
    return prepared;
  }

  // To each rank: how many rows for each of its experts, then those rows, in ascending (token,
  // slot) order for each expert.
  void fill_messages(const PrepareArgs& a, const Buffers& b,
                     prepare_finalize::RankExchange& x) const {
    std::vector<std::byte*> rows(static_cast<std::size_t>(ranks_));
    for (int r = 0; r < ranks_; ++r) {
      std::int64_t count = 0;
      for (const std::int32_t e : ids_of(r)) count += b.sent[e];
      std::byte* to = x.message(r, count, count_bytes(experts_of(r)) + count * wire_.row_bytes());
      for (const std::int32_t e : ids_of(r)) {
        std::memcpy(to, &b.sent[e], sizeof(std::int32_t));
        to += sizeof(std::int32_t);
      }
      rows[static_cast<std::size_t>(r)] = to;
    }
    const auto* ids = a.topk_ids.as<std::int32_t>();
    const std::int64_t slots = p_.top_k / wire_.rows_per_token();  // of a packed row
    for (std::int64_t s = 0; s < a.hidden_states.dim(0) * p_.top_k; ++s) {
      if (ids[s] < 0) continue;
      const auto e = static_cast<std::size_t>(ids[s]);
      std::byte* to = rows[static_cast<std::size_t>(directory_.owner[e])];
      std::memcpy(to + (b.first[e] + b.slot_row[s]) * wire_.row_bytes(),
                  b.packed + s / slots * wire_.row_bytes(),
                  static_cast<std::size_t>(wire_.row_bytes()));
    }
  }

  // Rows of rank r go behind those of the ranks before it: the order does not depend on arrival.
  Status fill_slabs(int r, const Buffers& b, const prepare_finalize::RankExchange& x) const {
    const std::int64_t mine = p_.num_local_experts;
    const auto payload = x.payload(r);
    std::int32_t* from = b.received + r * mine;
    const auto wrong = [&](std::string_view what) {
      return broken("dispatch", fmt::format("rank {} announced {} rows for {} experts, {} ({} "
                                            "bytes)",
                                            r, x.rows(r), mine, what, payload.size()));
    };
    if (static_cast<std::int64_t>(payload.size()) !=
        count_bytes(mine) + x.rows(r) * wire_.row_bytes()) {
      return wrong("but sent another number");
    }
    if (mine > 0) std::memcpy(from, payload.data(), static_cast<std::size_t>(count_bytes(mine)));
    std::int64_t total = 0;
    for (std::int64_t e = 0; e < mine; ++e) {
      if (from[e] < 0 || from[e] > max_tokens_) return wrong("but a count is outside 0 .. T");
      total += from[e];
    }
    if (total != x.rows(r)) return wrong("but its counts have another sum");
    const std::byte* row = payload.data() + count_bytes(mine);
    for (std::int64_t e = 0; e < mine; ++e) {
      for (std::int32_t i = 0; i < from[e]; ++i, row += wire_.row_bytes()) {
        const std::int64_t to = e * p_.max_tokens + b.counts[e]++;
        std::memcpy(b.hidden + to * wire_.hidden_bytes(), row,
                    static_cast<std::size_t>(wire_.hidden_bytes()));
        if (!wire_.quantized()) continue;
        std::memcpy(b.scales + to * wire_.groups(), row + wire_.hidden_bytes(),
                    static_cast<std::size_t>(wire_.row_bytes() - wire_.hidden_bytes()));
      }
    }
    return {};
  }

  // The experts' rows go back to where they came from, in the order in which they came.
  Status return_rows(const FinalizeArgs& a, const Buffers& b,
                     prepare_finalize::RankExchange& x) const {
    const std::int64_t mine = p_.num_local_experts;
    const bool ran = a.expert_output.rank() == 3;  // else no row came
    if (ran && (a.expert_output.dtype != DType::kF32 ||
                !(a.expert_output.shape == Shape{mine, p_.max_tokens, p_.hidden_size}))) {
      return {StatusCode::kInvalidShape,
              fmt::format("expert_output: got {} {}, need F32 [{}, {}, {}]",
                          dtype_name(a.expert_output.dtype), a.expert_output.shape.to_string(),
                          mine, p_.max_tokens, p_.hidden_size)};
    }
    std::vector<std::int64_t> next(static_cast<std::size_t>(mine), 0);
    for (int r = 0; r < ranks_; ++r) {
      const std::int32_t* from = b.received + r * mine;
      std::int64_t rows = 0;
      for (std::int64_t e = 0; e < mine; ++e) rows += from[e];
      std::byte* to = x.message(r, rows, rows * result_bytes());
      for (std::int64_t e = 0; e < mine; ++e) {
        for (std::int32_t i = 0; i < from[e]; ++i, to += result_bytes()) {
          const std::int64_t row = e * p_.max_tokens + next[static_cast<std::size_t>(e)]++;
          pack_result(a.expert_output.as<float>() + row * p_.hidden_size, to);
        }
      }
    }
    return {};
  }

  Status send_results(const FinalizeArgs& a, prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    Status bad = arena.status();
    if (bad.ok()) bad = return_rows(a, b, x);
    return bad.ok() ? x.send() : x.refuse(bad);
  }

  Status take_results(const FinalizeArgs& a,
                      const prepare_finalize::RankExchange& x) const override {
    Arena arena(a.workspace);
    const Buffers b = carve(arena);
    for (int r = 0; r < ranks_; ++r) {
      std::int64_t need = 0;
      for (const std::int32_t e : ids_of(r)) need += b.sent[e];
      if (x.rows(r) != need ||
          static_cast<std::int64_t>(x.payload(r).size()) != need * result_bytes()) {
        return broken("combine", fmt::format("rank {} sent {} rows in {} bytes, need {} rows", r,
                                             x.rows(r), x.payload(r).size(), need));
      }
    }
    // fp32, slots in order, rounded once: what the experts of one rank alone do.
    const cpu::ScopedIeeeMode ieee;
    const auto* ids = a.topk_ids.as<std::int32_t>();
    const auto* weights = a.topk_weights.as<float>();
    float* sum = b.scratch + p_.hidden_size;
    const std::int64_t width = dtype_bits(a.output.dtype) / 8;
    for (std::int64_t t = 0; t < a.output.dim(0); ++t) {
      std::fill(sum, sum + p_.hidden_size, 0.0F);
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        const std::int64_t s = t * p_.top_k + j;
        if (ids[s] < 0) continue;
        const auto e = static_cast<std::size_t>(ids[s]);
        const bool weighted =
            !a.apply_router_weight_on_input && !MOESAIC_FAULT(batched_all_to_all_unweighted);
        const std::int64_t place = MOESAIC_FAULT(batched_all_to_all_wrong_row) ? 0 : b.slot_row[s];
        add_result(x.payload(directory_.owner[e]).data() + (b.first[e] + place) * result_bytes(),
                   weighted ? weights[s] : 1.0F, b.scratch, sum);
      }
      kernels_->store_row(sum, p_.hidden_size, a.output.dtype,
                          a.output.data + t * p_.hidden_size * width);
    }
    return {};
  }
};

// Slabs and messages, whose sizes the methods above multiply out, have fewer than 2^62 bytes.
Status check_sizes(const MoeProblem& problem, const AllToAllOptions& options,
                   const prepare_finalize::RowWire& wire,
                   const prepare_finalize::ExpertDirectory& directory) {
  const std::int64_t most =
      *std::max_element(directory.num_local.begin(), directory.num_local.end());
  const auto slabs = checked_mul(most, problem.max_tokens);
  const auto message = checked_mul(options.max_tokens_per_rank, std::min(problem.top_k, most));
  const auto packed = checked_mul(options.max_tokens_per_rank, wire.rows_per_token());
  const auto row = checked_mul(problem.hidden_size, std::int64_t{sizeof(float)});
  if (slabs && message && packed && row) {
    const std::int64_t rows = std::max({*slabs, *message, *packed});
    const auto bytes = checked_mul(rows, std::max(*row, wire.row_bytes()));
    // Counts travel with the rows; 2^61 leaves room for them.
    if (bytes && *bytes < std::int64_t{1} << 61) return {};
  }
  return {StatusCode::kLimitExceeded,
          fmt::format("workspace: slabs of {} experts x {} rows x {} elements exceed 2^61 bytes",
                      most, problem.max_tokens, problem.hidden_size)};
}

}  // namespace

Result<std::unique_ptr<PrepareAndFinalize>> make_batched_all_to_all_prepare_finalize(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options) {
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::batched_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_options(communicator.get(), options));
  const int ranks = communicator->size();
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::RankTransport::check_slabs(problem, options, ranks));
  MOESAIC_ASSIGN_OR_RETURN(
      prepare_finalize::ExpertDirectory directory,
      prepare_finalize::RankTransport::make_directory(problem, options.parallel, ranks));
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_owned(problem, directory, communicator->rank()));
  MOESAIC_ASSIGN_OR_RETURN(
      const prepare_finalize::RowWire wire,
      prepare_finalize::RowWire::create(problem, options.quantize_before_dispatch));
  MOESAIC_RETURN_IF_ERROR(check_sizes(problem, options, wire, directory));
  std::unique_ptr<PrepareAndFinalize> pf(new (std::nothrow) BatchedAllToAllPrepareFinalize(
      problem, std::move(communicator), options, wire, std::move(directory)));
  if (!pf) return Status(StatusCode::kOutOfMemory, "cannot allocate prepare_finalize");
  return pf;
}

}  // namespace moesaic
