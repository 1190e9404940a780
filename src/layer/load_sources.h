// ExpertSources that convert one expert at a time on its way from a checkpoint to a backend; their
// buffers hold one expert.
#pragma once

#include <memory>

#include "layer/quant_selection.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic {

// The source itself for kNone, else one that wraps it (and must not outlive it).
//   kRound             kUnsupported when a finite weight becomes infinite in the target dtype
//   kQuantizeFp8Block  errors of quantize_fp8_block (NaN or infinite weights)
// Biases pass through. kOutOfMemory.
Result<std::unique_ptr<ExpertSource>> make_converting_source(ExpertSource& source,
                                                             const QuantPlan& plan);

}  // namespace moesaic
