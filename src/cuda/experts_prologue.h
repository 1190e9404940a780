// The experts' prologue: what their GEMMs need that does not depend on the routing. A kernel that
// runs in front of the experts (the gate's or the router's) can do it beside its own work, which
// saves a launch.
#pragma once

#include <cstdint>

#include "cuda/quant_rows.h"

namespace moesaic::cuda {

// Rows of hidden states quantised (quant.tokens may be 0) and words of the experts' workspace
// zeroed. Without words there is no prologue.
struct ExpertsPrologue {
  QuantRowsParams quant;
  std::uint32_t* zero = nullptr;
  std::int32_t zero_words = 0;
  // The experts' kernel should start before the gate's predecessors have ended. Not where it leaves
  // multiprocessors without work: which ones then depends on who ended first.
  bool starts_early = false;
};

}  // namespace moesaic::cuda
