// What a ModularKernel holds, and the steps of its call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "core/arena.h"
#include "core/checked.h"
#include "moesaic/device_tensor.h"
#include "moesaic/modular_kernel.h"

namespace moesaic {

struct ModularKernel::Impl {
  MoeProblem problem;
  Options options;
  std::unique_ptr<PrepareAndFinalize> pf;
  std::unique_ptr<Experts> experts;
  DeviceTensor workspace;       // on the problem's device: one slot for each call in flight
  std::int64_t slot_bytes = 0;  // of a slot
  mutable std::mutex mutex;     // of the two below; a run() holds it until its end
  mutable std::uint32_t slots_taken = 0;  // a bit for each
  mutable int calls = 0;                  // that were started and are not over

  // The three pieces of the workspace for M tokens. The experts' output gets a piece of its own
  // unless they can write straight into the caller's output; in place those of a GPU can.
  struct Pieces {
    std::span<std::byte> prepare, experts;
    std::byte* expert_output = nullptr;
  };
  bool writes_output_directly() const {
    return experts->reduction() == TopKWeightAndReduce::kNoOp && pf->keeps_rows() &&
           (!options.inplace || problem.device.is_cuda());
  }
  std::int64_t expert_tokens(std::int64_t tokens) const {
    return problem.format == ActivationFormat::kBatched ? problem.max_tokens
                                                        : pf->max_dispatched_tokens(tokens);
  }
  // Rows of the experts' output: M', M' * k, or all slab rows.
  Result<Shape> expert_output_shape(std::int64_t rows) const {
    if (problem.format == ActivationFormat::kBatched) {
      return Shape{problem.num_local_experts, problem.max_tokens, problem.hidden_size};
    }
    if (experts->reduction() == TopKWeightAndReduce::kNoOp) return Shape{rows, problem.hidden_size};
    const auto slots = checked_mul(rows, problem.top_k);
    if (!slots) return Status(StatusCode::kLimitExceeded, "max_tokens x top_k exceeds 2^63-1");
    return Shape{*slots, problem.hidden_size};
  }

  Result<Pieces> carve(Arena& arena, std::int64_t tokens) const {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t prepare_bytes, pf->workspace_size(tokens));
    const std::int64_t rows = expert_tokens(tokens);
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t expert_bytes, experts->workspace_size(rows));
    Pieces p;
    p.prepare = {arena.take<std::byte>(prepare_bytes), static_cast<std::size_t>(prepare_bytes)};
    p.experts = {arena.take<std::byte>(expert_bytes), static_cast<std::size_t>(expert_bytes)};
    if (!writes_output_directly() && !pf->owns_expert_output()) {
      MOESAIC_ASSIGN_OR_RETURN(const Shape shape, expert_output_shape(rows));
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(DType::kF32, shape));
      p.expert_output = arena.take<std::byte>(bytes);
    }
    MOESAIC_RETURN_IF_ERROR(arena.status());
    return p;
  }

  // A free slot, which is then taken. kLimitExceeded when there is none.
  Result<int> take_slot() const;
  void give_slot(int slot) const;
  // Bytes for M tokens.
  Result<std::int64_t> workspace_size(std::int64_t tokens) const;
  // The caller's workspace where the call brings one, or slot `slot` of the kernel's own.
  Result<std::span<std::byte>> workspace_of(const Args& a, int slot) const;
  // The pieces in that workspace.
  Result<Pieces> lay_out(const Args& a, int slot) const;

  Status check(const Args& a) const;
  PrepareArgs prepare_args(const Args& a, const Pieces& pieces) const;
  // The experts on what arrived; none where nothing was dispatched. Returns their output.
  Result<TensorView> compute(const Args& a, const Prepared& prepared, const Pieces& pieces) const;
  FinalizeArgs finalize_args(const Args& a, const Pieces& pieces,
                             const TensorView& expert_output) const;
  Status run_experts(const Args& a, const Prepared& prepared, const Pieces& pieces,
                     const TensorView& expert_output) const;
};

}  // namespace moesaic
