// Sizes of a call from the tensors of an engine.
#include <fmt/format.h>

#include <utility>

#include "moesaic/interop/own_layer.h"

namespace moesaic {

Result<ProblemSizes> derive_problem_sizes(const ConstTensorView& w13,
                                          const ConstTensorView& hidden_states,
                                          const ConstTensorView& topk_ids,
                                          std::int64_t num_experts) {
  const auto bad = [](std::string text) {
    return Status(StatusCode::kInvalidShape, std::move(text));
  };
  if (w13.rank() != 3)
    return bad(fmt::format("w13: got {}, need [E_l, N, ...]", w13.shape.to_string()));
  if (topk_ids.rank() != 2) {
    return bad(fmt::format("topk_ids: got {}, need [M, k]", topk_ids.shape.to_string()));
  }
  for (const auto& [field, t] : {std::pair{"w13", w13}, std::pair{"hidden_states", hidden_states},
                                 std::pair{"topk_ids", topk_ids}}) {
    for (const std::int64_t size : t.shape.dims()) {
      if (size < 0) {
        return bad(fmt::format("{}: got {}, need dimensions >= 0", field, t.shape.to_string()));
      }
    }
  }
  ProblemSizes s;
  s.num_local_experts = w13.dim(0);
  s.w13_rows = w13.dim(1);
  s.num_experts = num_experts == -1 ? s.num_local_experts : num_experts;
  s.top_k = topk_ids.dim(1);
  if (hidden_states.rank() == 2) {
    s.tokens = hidden_states.dim(0);
    s.hidden_size = hidden_states.dim(1);
    if (topk_ids.dim(0) != s.tokens) {
      return bad(
          fmt::format("topk_ids: got {} rows, hidden_states has {}", topk_ids.dim(0), s.tokens));
    }
  } else if (hidden_states.rank() == 3) {
    s.tokens = hidden_states.dim(1);
    s.hidden_size = hidden_states.dim(2);
    if (hidden_states.dim(0) != s.num_local_experts) {
      return bad(fmt::format("hidden_states: got {} slabs, w13 has {} local experts",
                             hidden_states.dim(0), s.num_local_experts));
    }
  } else {
    return bad(fmt::format("hidden_states: got {}, need [M, H] or [E_l, T, H]",
                           hidden_states.shape.to_string()));
  }
  if (s.num_experts < s.num_local_experts) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_experts: got {}, need at least the {} local ones, or -1",
                              num_experts, s.num_local_experts));
  }
  return s;
}

}  // namespace moesaic
