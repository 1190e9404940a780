// Pieces for an engine that has a layer of its own around kernels of this or another library.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "moesaic/activation.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// Read by: engines that have a GEMM before and after and no activation in between. The layer's own
// backends activate inside their GEMMs, with the same formulas.
// Applies the activation to every row, in fp32, rounding once to the output's dtype.
//   in   [rows, 2d] (gated) or [rows, d]; or batched [E_l, rows, 2d or d]. F32, BF16 or F16,
//        contiguous
//   out  the same leading dimensions and d columns; F32, BF16 or F16, contiguous; must not overlap
//        `in`
//   expert_num_tokens  batched: [E_l], only the first expert_num_tokens[e] rows of slab e are read
//        and written; rank 2: one count or empty. Empty: all rows.
// NaN in gives NaN out. Errors: kInvalidArgument (spec, a count outside [0, rows], kNonGated with a
// gated kind or the reverse), kInvalidDType, kInvalidShape (the output is exactly half as wide as a
// gated input), kInvalidLayout, kAliasing. Allocates nothing. Deterministic, each element by
// itself. Plain loops: the reference.
Status apply_activation(const ActivationSpec& spec, GateUpLayout layout, ConstTensorView in,
                        TensorView out, std::span<const std::int32_t> expert_num_tokens = {});

// Read by: engines that find out a call's problem from its tensors, as the original does, where
// MoeProblem (experts.h) states it beforehand.
// Sizes of a call, read from tensors: E_l and N from w13's leading axes, H from the activations
// (never from the last axis of a weight, where 4-bit formats pack two values per byte), k from ids.
struct ProblemSizes {
  std::int64_t num_local_experts = 0, num_experts = 0, w13_rows = 0, tokens = 0, hidden_size = 0,
               top_k = 0;
};
//   w13            [E_l, N, anything]
//   hidden_states  [M, H], or [E_l, M, H] (batched)
//   topk_ids       [M, k] (standard: its M must equal that of hidden_states)
//   num_experts    global count, -1: equal to E_l
// kInvalidShape names the two axes that disagree, kInvalidArgument a num_experts below E_l.
Result<ProblemSizes> derive_problem_sizes(const ConstTensorView& w13,
                                          const ConstTensorView& hidden_states,
                                          const ConstTensorView& topk_ids,
                                          std::int64_t num_experts = -1);

// Read by: engines' load experiments, which want other distributions of experts than the built-in
// ones.
// A routing simulation: (seed, num_experts) -> fills weights [M, k] F32 and ids [M, k] I32, both
// contiguous, ids 0 to num_experts - 1. Ids may repeat in a row.
using SimulationStrategyFn = std::function<Status(std::uint64_t seed, std::int64_t num_experts,
                                                  TensorView topk_weights, TensorView topk_ids)>;
// Makes `name` a value of Router::Options::simulation_strategy, for the whole process. Thread-safe.
// kInvalidArgument for an empty name, an empty function or a name that is taken.
Status register_simulation_strategy(const std::string& name, SimulationStrategyFn strategy);

}  // namespace moesaic
