// What of a call with few tokens the kernels in front of the experts do for them: decided once for
// every number of tokens, when the layer is made.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

enum class InFront : std::uint8_t {
  kNothing,         // gate, router, and the experts prepare their own rows and work list
  kRouterPrepares,  // the router's launch prepares them: a kernel less
  kGatePrepares,    // the gate's does, and the experts' kernel routes: two kernels less
};

// What the stages can do in a call of one number of tokens.
struct FewTokensFacts {
  bool experts_take_it = false;    // their preparation can be done in front
  bool gate_prepares = false;      // by the gate's kernel for such rows
  bool router_rule_moves = false;  // the rule is one that another kernel can apply ...
  bool experts_route = false;      // ... and the experts' kernel does
};
constexpr InFront choose_in_front(const FewTokensFacts& f) {
  if (!f.experts_take_it) return InFront::kNothing;
  return f.gate_prepares && f.router_rule_moves && f.experts_route ? InFront::kGatePrepares
                                                                   : InFront::kRouterPrepares;
}

// By tokens and dtype of the rows that the gate reads; kNothing past the last number that add() was
// told of.
class FewTokensPlan {
 public:
  // For one token more than the last call's.
  void add(InFront bf16, InFront f16, InFront f32) { rows_.push_back({bf16, f16, f32}); }
  InFront of(std::int64_t tokens, DType x_dtype) const {
    if (tokens < 1 || tokens > static_cast<std::int64_t>(rows_.size())) return InFront::kNothing;
    const Row& row = rows_[static_cast<std::size_t>(tokens - 1)];
    return x_dtype == DType::kBF16 ? row.bf16 : x_dtype == DType::kF16 ? row.f16 : row.f32;
  }

 private:
  struct Row {
    InFront bf16, f16, f32;
  };
  std::vector<Row> rows_;
};

}  // namespace moesaic::cuda
