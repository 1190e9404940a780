// The batched reference: copies each row into the slab of every local expert that was chosen for
// it.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>

#include "core/arena.h"
#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/modular_kernel.h"
#include "numerics/element.h"
#include "permute/sort_slots.h"
#include "prepare_finalize/call_checks.h"
#include "prepare_finalize/predicates.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/topk_weight_and_reduce.h"
#include "quant/compute_scheme.h"

namespace moesaic::prepare_finalize {
namespace {

class BatchedPrepareFinalize final : public PrepareAndFinalize {
 public:
  BatchedPrepareFinalize(const MoeProblem& problem, DType slab_dtype)
      : p_(problem), slab_dtype_(slab_dtype) {}

  std::string_view name() const override { return "batched_reference"; }
  ActivationFormat format() const override { return ActivationFormat::kBatched; }
  Status attach(const Experts& experts) override {
    const TopKWeightAndReduce r = experts.reduction();
    if (r == TopKWeightAndReduce::kNaiveBatched || r == TopKWeightAndReduce::kDelegate) return {};
    return {StatusCode::kUnsupported,
            fmt::format("prepare_finalize batched_reference: experts {} do not leave a batched or "
                        "delegated reduction",
                        experts.name())};
  }
  bool output_is_reduced() const override { return false; }
  bool keeps_rows() const override { return false; }
  std::int64_t max_dispatched_tokens(std::int64_t) const override { return p_.max_tokens; }
  Result<std::int64_t> workspace_size(std::int64_t tokens) const override {
    if (tokens < 0) {
      return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
    }
    Arena arena = Arena::measure();
    MOESAIC_ASSIGN_OR_RETURN(const Buffers unused, carve(arena, tokens));
    static_cast<void>(unused);
    return arena.used();
  }

  Result<Prepared> prepare(const PrepareArgs& a) const override {
    MOESAIC_RETURN_IF_ERROR(check_prepare_args(p_, a));
    const std::int64_t tokens = a.hidden_states.dim(0);
    const std::span<const std::int32_t> ids{a.topk_ids.as<std::int32_t>(),
                                            static_cast<std::size_t>(tokens * p_.top_k)};
    MOESAIC_RETURN_IF_ERROR(permute::validate_topk_ids(ids, a.expert_map, p_.num_experts,
                                                       p_.num_local_experts, p_.top_k));
    Arena arena(a.workspace);
    MOESAIC_ASSIGN_OR_RETURN(const Buffers b, carve(arena, tokens));
    std::fill(b.counts, b.counts + p_.num_local_experts, 0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < p_.top_k; ++j) {
        const std::int64_t slot = t * p_.top_k + j;
        const std::int32_t e =
            permute::local_expert_of(ids[static_cast<std::size_t>(slot)], a.expert_map);
        if (e < 0) continue;
        if (b.counts[e] >= p_.max_tokens) {
          return Status(StatusCode::kLimitExceeded,
                        fmt::format("local expert {}: got more than {} rows, need at most T = {}",
                                    e, b.counts[e], p_.max_tokens));
        }
        const std::int32_t row = b.counts[e]++;
        b.slot_rows[slot] = row;
        copy_row(a.hidden_states, t, a.topk_weights.as<float>()[slot], b.slabs,
                 (e * p_.max_tokens + row) * p_.hidden_size);
      }
    }
    Prepared prepared;
    prepared.hidden_states = ConstTensorView(
        b.slabs, slab_dtype_, Shape{p_.num_local_experts, p_.max_tokens, p_.hidden_size});
    prepared.expert_num_tokens = {b.counts, static_cast<std::size_t>(p_.num_local_experts)};
    return prepared;
  }

  Status finalize(const FinalizeArgs& a) const override {
    if (a.reduction != TopKWeightAndReduce::kNaiveBatched &&
        a.reduction != TopKWeightAndReduce::kDelegate) {
      return {StatusCode::kUnsupported,
              "reduction: batched finalize needs naive batched or delegated"};
    }
    MOESAIC_RETURN_IF_ERROR(check_finalize_args(p_, a));
    const std::int64_t tokens = a.output.dim(0);
    if (a.expert_output.rank() != 3) {  // the experts did not run: no local slot anywhere
      if (tokens > 0) {
        MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes,
                                 contiguous_bytes(a.output.dtype, a.output.shape));
        std::memset(a.output.data, 0, static_cast<std::size_t>(bytes));
      }
      return {};
    }
    const Shape slabs{p_.num_local_experts, p_.max_tokens, p_.hidden_size};
    MOESAIC_RETURN_IF_ERROR(expect_shape("expert_output", a.expert_output, slabs));
    Arena arena(a.workspace);
    MOESAIC_ASSIGN_OR_RETURN(const Buffers b, carve(arena, tokens));
    return reduce_naive_batched(a.output, a.expert_output,
                                {a.topk_weights.as<float>(), a.topk_ids.as<std::int32_t>(),
                                 a.expert_map, p_.top_k, a.apply_router_weight_on_input},
                                {b.slot_rows, static_cast<std::size_t>(tokens * p_.top_k)});
  }

 private:
  struct Buffers {
    std::byte* slabs = nullptr;         // [E_l, T, H] of slab_dtype_
    std::int32_t* counts = nullptr;     // [E_l]
    std::int32_t* slot_rows = nullptr;  // [M, k], undefined for slots without a local expert
  };

  // Counts and rows lie before the slabs, so that they are found again for any M.
  Result<Buffers> carve(Arena& arena, std::int64_t tokens) const {
    const auto slots = checked_mul(tokens, p_.top_k);
    const auto rows = checked_mul(p_.num_local_experts, p_.max_tokens);
    const auto elements = rows ? checked_mul(*rows, p_.hidden_size) : std::nullopt;
    const auto bytes =
        elements ? checked_mul(*elements, dtype_bits(slab_dtype_) / 8) : std::nullopt;
    if (!slots || !bytes) {
      return Status(StatusCode::kLimitExceeded, "workspace: batched slabs exceed 2^63-1 bytes");
    }
    Buffers b;
    b.counts = arena.take<std::int32_t>(p_.num_local_experts);
    b.slot_rows = arena.take<std::int32_t>(*slots);
    b.slabs = arena.take<std::byte>(*bytes);
    MOESAIC_RETURN_IF_ERROR(arena.status());
    return b;
  }

  // Row t in the slab's dtype, times the router weight (rounded to it as well) where the problem
  // says so. The caller's row is left alone: shared experts may still read it.
  void copy_row(const ConstTensorView& x, std::int64_t t, float weight, std::byte* slabs,
                std::int64_t to) const {
    const std::int64_t from = t * x.strides[0];
    const bool on_input =
        p_.apply_router_weight_on_input && !MOESAIC_FAULT(batched_skip_weight_on_input);
    if (!on_input && x.dtype == slab_dtype_) {
      const std::int64_t width = dtype_bits(slab_dtype_) / 8;
      std::memcpy(slabs + to * width, x.data + from * width,
                  static_cast<std::size_t>(p_.hidden_size * width));
      return;
    }
    const float factor = rounded(weight);
    for (std::int64_t i = 0; i < p_.hidden_size; ++i) {
      const float value = rounded(load_as_f32(x.data, x.dtype, from + i));
      store_from_f32(slabs, slab_dtype_, to + i, on_input ? value * factor : value);
    }
  }
  float rounded(float value) const {
    std::array<std::byte, sizeof(float)> cell{};
    store_from_f32(cell.data(), slab_dtype_, 0, value);
    return load_as_f32(cell.data(), slab_dtype_, 0);
  }

  MoeProblem p_;
  DType slab_dtype_;
};

}  // namespace

Status batched_can_implement(const MoeProblem& problem) {
  if (problem.format != ActivationFormat::kBatched) {
    return {StatusCode::kUnsupported,
            "format: the experts want the standard format, batched_reference yields slabs"};
  }
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  if (problem.max_tokens >= 1) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("max_tokens: got {}, the batched format needs T >= 1", problem.max_tokens)};
}

}  // namespace moesaic::prepare_finalize

namespace moesaic {

Result<std::unique_ptr<PrepareAndFinalize>> make_batched_prepare_finalize(
    const MoeProblem& problem) {
  if (problem.device.is_cuda()) return cuda::make_sm90_batched(problem);
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::batched_can_implement(problem));
  std::unique_ptr<PrepareAndFinalize> pf(
      new (std::nothrow) prepare_finalize::BatchedPrepareFinalize(
          problem, quant::operand_dtype(problem.activation_dtype, problem.quant.kind)));
  if (!pf) return Status(StatusCode::kOutOfMemory, "cannot allocate prepare_finalize");
  return pf;
}

}  // namespace moesaic
