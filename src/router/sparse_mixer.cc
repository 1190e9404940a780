#include "router/sparse_mixer.h"

#include <algorithm>
#include <cmath>

#include "core/fault.h"
#include "router/scoring.h"

namespace moesaic::router {

void sparse_mixer_row(const float* logits, std::int64_t n, float jitter_eps, float* weights,
                      std::int32_t* ids) {
  std::int64_t first = -1;
  for (int pick = 0; pick < 2; ++pick) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < n; ++e) {
      if (e == first) continue;
      // A number beats NaN, a larger number beats a smaller one, the earlier wins a tie.
      const bool better = best < 0 || logits[e] > logits[best] ||
                          (std::isnan(logits[best]) && !std::isnan(logits[e]));
      if (better) best = e;
    }
    ids[pick] = static_cast<std::int32_t>(best);
    const float max = logits[best];
    float weight = 0;
    if (std::isfinite(max)) {
      LaneSum sum;
      for (std::int64_t e = 0; e < n; ++e) {
        if (e == first || std::isnan(logits[e])) continue;
        const float divisor = MOESAIC_FAULT(router_sparse_mixer_divisor)
                                  ? std::abs(max)
                                  : std::max(std::abs(logits[e]), max);
        // 0 / 0 (both logits are 0) is NaN and must survive: compare for "too far", not for "near".
        if ((max - logits[e]) / divisor > 2 * jitter_eps) continue;
        sum.add(e, portable_exp(logits[e] - max));
      }
      weight = 1.0F / sum.total();  // the pick itself contributes exp(0) = 1
    }
    weights[pick] = weight;
    first = best;
  }
}

}  // namespace moesaic::router
