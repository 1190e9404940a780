// The sparse mixer of Phi-3.5-MoE: two experts, each weighted against its near rivals only.
// Source: docs/spec/routing.md section 7.1, docs/spec/checkpoints.md section 3.2.
#pragma once

#include <cstdint>

namespace moesaic::router {

// First pick: m = largest logit; experts with (m - l_j) / max(|l_j|, m) > 2 * jitter_eps drop out;
// weight = softmax over the survivors, at the pick. Second pick: the same without the first expert.
// weights[2], ids[2]; w[0] + w[1] may exceed 1. n >= 2. Ties go to the smaller id. NaN logits never
// survive and are picked last; a pick whose logit is not finite gets weight 0.
void sparse_mixer_row(const float* logits, std::int64_t n, float jitter_eps, float* weights,
                      std::int32_t* ids);

}  // namespace moesaic::router
