// Which bytes of a tensor of the routed experts a rank's reader asks for: what is kept of a tensor that
// somebody hands over whole. Where the reader takes windows, the same function says which
// (window.h). Source: docs/spec/checkpoints.md sections 6.2 and 6.3.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/binding/layer_plan.h"
#include "checkpoint/container/pushed_tensors.h"
#include "checkpoint/reader/window.h"

namespace moesaic::checkpoint {

// Does every rank need the tensor, whoever owns its expert? True of the numbers that all experts
// decide together: static activation scales, scales of whole tensors and group indices, of which
// those of gate and up agree or not.
bool counts_for_all_ranks(const LinearFormat& format, TensorKind kind);

// Does another layout of the family give the experts' tensors the same names, so that how they lie
// is not known before all are there?
bool has_twin(const LayerSource& source);

// Of a planned tensor of the experts, in a shape that the plan has. Group and block scales that are
// not read by windows, numbers of whole tensors, biases and the words of integers are kept whole,
// those of all experts with them.
//   experts   the global ids that this rank has, distinct
//   settled   false: how the experts lie may turn out otherwise; whole experts are kept then
std::vector<ByteRuns> held_runs(const PlannedTensor& planned, const TensorInfo& info,
                                const MlpSlice& slice, std::span<const std::int64_t> experts,
                                bool settled);

}  // namespace moesaic::checkpoint
