// Float64 results for single tokens, from any source of weights: the check that every benchmark
// runs first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moesaic/experts.h"

namespace moesaic::tool {

// sum over j of weights[j] * expert(ids[j], x), all in double on the weights as stored. Skips ids <
// 0.
Result<std::vector<double>> reference_token(const MoeProblem& problem, ExpertSource& source,
                                            std::span<const double> x,
                                            std::span<const std::int32_t> ids,
                                            std::span<const float> weights);
// |got - want| / |want|. Where both are NaN, or the same infinity, they are equal and in neither norm;
// infinite when nothing else is left to compare with.
double relative_l2(std::span<const double> got, std::span<const double> want);
std::vector<double> row_to_doubles(const ConstTensorView& matrix, std::int64_t row);

}  // namespace moesaic::tool
