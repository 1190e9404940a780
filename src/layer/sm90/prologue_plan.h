// Which kernel runs the experts' prologue (cuda/experts_prologue.h): decided once for every number
// of tokens, when the layer is made.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

enum class ProloguePlace : std::uint8_t {
  kInExperts,  // the experts' own first kernel, which also makes the work list
  kInRouter,   // the router's kernel: one launch less
  kInGate,     // the gate's kernel, and the experts' GEMM kernel routes: two launches less
};

// What the stages can do in a call of one number of tokens.
struct PrologueFacts {
  bool experts_have_prologue = false;  // that another kernel can run
  bool gate_runs_prologue = false;     // the gate's kernel for such rows can
  bool router_rule_moves = false;      // the rule is one that another kernel can apply ...
  bool experts_route = false;          // ... and the experts' kernel does
};
constexpr ProloguePlace choose_prologue_place(const PrologueFacts& f) {
  if (!f.experts_have_prologue) return ProloguePlace::kInExperts;
  return f.gate_runs_prologue && f.router_rule_moves && f.experts_route ? ProloguePlace::kInGate
                                                                        : ProloguePlace::kInRouter;
}

// By tokens and dtype of the rows that the gate reads; kInExperts past the last number of tokens
// given to add().
class ProloguePlan {
 public:
  // For one token more than the last call's.
  void add(ProloguePlace bf16, ProloguePlace f16, ProloguePlace f32) {
    rows_.push_back({bf16, f16, f32});
  }
  ProloguePlace of(std::int64_t tokens, DType x_dtype) const {
    if (tokens < 1 || tokens > static_cast<std::int64_t>(rows_.size()))
      return ProloguePlace::kInExperts;
    const Row& row = rows_[static_cast<std::size_t>(tokens - 1)];
    return x_dtype == DType::kBF16 ? row.bf16 : x_dtype == DType::kF16 ? row.f16 : row.f32;
  }

 private:
  struct Row {
    ProloguePlace bf16, f16, f32;
  };
  std::vector<Row> rows_;
};

}  // namespace moesaic::cuda
