// ExpertSources that convert one expert at a time on its way from a checkpoint to a backend; their
// buffers hold one expert.
#pragma once

#include <memory>

#include "layer/quant_selection.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::layer {

// The source itself for kNone, else one that wraps it (and must not outlive it).
//   kRound     kUnsupported when a finite weight becomes infinite in the target dtype
//   kQuantize  errors of quantize_weight (NaN or infinite weights). Static input scales,
//              where the scheme has them, follow from the weights and from hidden states of
//              unit variance: the same on every rank. Rows far outside (a group's largest
//              value above 672) saturate.
// Biases pass through. kOutOfMemory.
Result<std::unique_ptr<ExpertSource>> make_converting_source(ExpertSource& source,
                                                             const QuantPlan& plan);

}  // namespace moesaic::layer
