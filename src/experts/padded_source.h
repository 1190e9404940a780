// Experts whose intermediate size a kernel does not take, with zeros behind it: what such a channel
// computes is 0, and so is its weight in the second GEMM.
#pragma once

#include <cstdint>
#include <vector>

#include "core/checked.h"
#include "moesaic/experts.h"

namespace moesaic::experts {

inline MoeProblem with_padded_width(MoeProblem problem, std::int64_t multiple) {
  problem.intermediate_size = round_up(problem.intermediate_size, multiple);
  return problem;
}

// The experts of `source`, made for `from`, as `to` has them: the same problem but for a larger
// intermediate size. Of whole-byte elements, without scales or with those of blocks, which both
// sizes have as many of (rows counted within gate and up). Checks what the source yields.
class PaddedSource final : public ExpertSource {
 public:
  // All three must outlive this object.
  PaddedSource(const MoeProblem& from, const MoeProblem& to, ExpertSource& source)
      : from_(from), to_(to), source_(source) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override;

 private:
  const MoeProblem& from_;
  const MoeProblem& to_;
  ExpertSource& source_;
  std::vector<std::byte> w13_, w2_, w13_bias_;
};

}  // namespace moesaic::experts
