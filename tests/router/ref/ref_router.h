// Float64 reference of the scored routing methods, written from the formulas and sharing no code
// with the library: sorts instead of lists, no special denominators.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/spec.h"

namespace moesaic::test {

struct RefRow {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
  // Smallest distance that decides anything (chosen against next, slot against slot, group against
  // group, survivor threshold), divided by what fp32 arithmetic may have shifted it. Above 1 the
  // ids are proven; below, the row is a near-tie.
  double clearance = 0;
};

// Methods: kTopK, kGroupedTopK, kTopKSoftmax, kLlama4, kSparseMixer, kPNorm, finite logits only.
// bias empty: none.
RefRow ref_route(const RoutingSpec& spec, const std::vector<double>& logits,
                 const std::vector<double>& bias);

}  // namespace moesaic::test
