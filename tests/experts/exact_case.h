// A case whose sums are exact, so that backends can be compared bit by bit.
#pragma once

#include <string_view>

#include "support/experts_run.h"

namespace moesaic::test {

// Pre-activations are small integers (gates: 64 more, where silu(g) == g in fp32), every row of w2
// has one unit and router weights are powers of two: no sum or product rounds, so an expert's row
// is what one rounding to bf16 leaves of it.
StandardCase exact_case(std::string_view quant, std::string_view activation, std::int64_t hidden,
                        std::int64_t intermediate, std::int64_t tokens, std::int64_t top_k);

}  // namespace moesaic::test
