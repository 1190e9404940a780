#include "router/scoring.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moesaic {
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
  float sum = 0;
  for (std::int64_t e = 0; e < n; ++e) {
    scores[e] = std::exp(logits[e] - max);
    sum += scores[e];
  }
  for (std::int64_t e = 0; e < n; ++e) scores[e] /= sum;  // sum >= exp(0) = 1
}

// sqrt(log(1 + exp(x))), as max(x, 0) + log1p(exp(-|x|)): for x > 20 the second term is below half
// an ulp, so the linear branch of the definition needs no case of its own.
float sqrt_softplus(float x) {
  return std::sqrt(std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x))));
}

}  // namespace

float sigmoid(float x) {
  const float e = std::exp(-std::abs(x));
  return (x >= 0 ? 1.0F : e) / (1.0F + e);
}

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
        scores[e] = std::isnan(logits[e]) ? 0.0F : sqrt_softplus(logits[e]);
      }
      return;
  }
}

}  // namespace moesaic
