#include "router/scoring.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moesaic::router {
namespace {

void softmax_row(const float* logits, std::int64_t n, float* scores) {
  float max = -std::numeric_limits<float>::infinity();
  bool has_nan = false;
  for (std::int64_t e = 0; e < n; ++e) {
    has_nan = has_nan || std::isnan(logits[e]);
    max = std::max(max, logits[e]);
  }
  // Otherwise exp(x - max) or the sum would be NaN for every expert of the row.
  if (has_nan || std::isinf(max)) {
    std::fill_n(scores, n, 0.0F);
    return;
  }
  LaneSum lanes;
  for (std::int64_t e = 0; e < n; ++e) {
    scores[e] = portable_exp(logits[e] - max);
    lanes.add(e, scores[e]);
  }
  const float sum = lanes.total();
  for (std::int64_t e = 0; e < n; ++e) scores[e] /= sum;  // sum >= exp(0) = 1
}

}  // namespace

void score_row(ScoringFunc func, const float* logits, std::int64_t n, float* scores) {
  switch (func) {
    case ScoringFunc::kSoftmax:
      softmax_row(logits, n, scores);
      return;
    case ScoringFunc::kSigmoid:
      for (std::int64_t e = 0; e < n; ++e) {
        scores[e] = std::isnan(logits[e]) ? 0.0F : sigmoid(logits[e]);
      }
      return;
    case ScoringFunc::kSqrtSoftplus:
      for (std::int64_t e = 0; e < n; ++e) {
        scores[e] = std::isnan(logits[e]) ? 0.0F : std::sqrt(portable_softplus(logits[e]));
      }
      return;
  }
}

}  // namespace moesaic::router
