// Scoring functions: logits of one row -> scores, in fp32. Source: spec routing.md section 3.
#pragma once

#include <cstdint>

#include "moesaic/spec.h"

namespace moesaic {

// 1 / (1 + exp(-x)), evaluated with the exponential of -|x| so that neither tail loses digits.
float sigmoid(float x);

// scores[e] = score of logits[e], e < n; may be in place. NaN and infinite scores become 0 (for
// sqrtsoftplus NaN only). softmax is over all n; a NaN or +inf among its logits makes the whole row
// 0, as does a row of -inf.
// Relative error: softmax (n + |max - x| + 8) * 2^-24, the others 2^-21.
void score_row(ScoringFunc func, const float* logits, std::int64_t n, float* scores);

}  // namespace moesaic
