// Experts from tensors of the caller's: any strides, transposed or not, gate and up in any of their
// arrangements, on any device; brought into canonical form one expert at a time.
#pragma once

#include <memory>

#include "moesaic/activation.h"
#include "moesaic/experts.h"

namespace moesaic::python {

struct OwnWeights {
  // Leading axis E: every field of ExpertWeightsView. w13 [E, N, H], or [E, H, N] when transposed;
  // scales, zero points and minima of its rows alike. Not owned.
  ExpertWeightsView tensors;
  GateUpLayout layout = GateUpLayout::kGateThenUp;
  bool transposed = false;
  Scheme stored;
};

// Sizes that the tensors say, after checking ranks and that they agree (kInvalidShape).
struct OwnSizes {
  std::int64_t num_experts = 0, hidden_size = 0, intermediate_size = 0;
};
Result<OwnSizes> own_sizes(const OwnWeights& weights);

// Of all its tensors.
std::int64_t bytes_of(const OwnWeights& weights);

// kUnsupported for arrangements that would cut scales or codes. The views are read while experts are
// asked for and must live until then.
Result<std::unique_ptr<ExpertSource>> make_own_source(const OwnWeights& weights);

}  // namespace moesaic::python
