// Scoring functions: logits of one row -> scores, in fp32, with the same bits on every device.
// Source: docs/spec/routing.md section 3.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "moesaic/kinds.h"
#include "numerics/portable_math.h"

namespace moesaic::router {

// 1 / (1 + exp(-x)), evaluated with the exponential of -|x| so that neither tail loses digits.
MOESAIC_HOST_DEVICE inline float sigmoid(float x) {
  const float e = portable_exp(x < 0 ? x : -x);
  return (x >= 0 ? 1.0F : e) / (1.0F + e);
}

// Adds fp32 numbers as the 32 lanes of a warp do, so that CPU and GPU get the same bits: lane l
// adds elements l, l + 32 ... in ascending order, then lanes are added by halving distances.
class LaneSum {
 public:
  void add(std::int64_t index, float value) { lanes_[index % kLanes] += value; }
  float total() {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      for (int l = 0; l < distance; ++l) lanes_[l] += lanes_[l + distance];
    }
    return lanes_[0];
  }

 private:
  static constexpr int kLanes = 32;
  float lanes_[kLanes] = {};
};

// scores[e] = score of logits[e], e < n; may be in place. NaN and infinite scores become 0 (for
// sqrtsoftplus NaN only). softmax is over all n; a NaN or +inf among its logits makes the whole row
// 0, as does a row of -inf.
// Relative error: softmax (n + |max - x| + 8) * 2^-24, the others 2^-21; while the score, of
// sqrtsoftplus softplus itself, is a normal fp32 number (logits above -87).
void score_row(ScoringFunc func, const float* logits, std::int64_t n, float* scores);

}  // namespace moesaic::router
