#include "router/route_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "router/scoring.h"
#include "router/sparse_mixer.h"
#include "router/top_k_list.h"

namespace moesaic::router {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// Added to the denominator by the grouped kernel; far below any score that matters.
constexpr float kGroupedDenominator = 1e-20F;

// (sum w^p)^(1/p) of k weights >= 0; relative to the largest so that no power under- or overflows.
float p_norm(const float* w, std::int64_t k, double p) {
  float sum = 0;
  if (p == 1.0) {
    for (std::int64_t j = 0; j < k; ++j) sum += w[j];
    return sum;
  }
  const float max = *std::max_element(w, w + k);
  if (!(max > 0)) return 0;
  const auto power = static_cast<float>(p);
  for (std::int64_t j = 0; j < k; ++j) sum += portable_pow(w[j] / max, power);
  return max * portable_pow(sum, 1 / power);
}

// Rank of a group: its best candidate, or the sum of its two best.
float group_score(const float* selection, std::int64_t size, bool top_two) {
  float first = -kInf, second = -kInf;
  for (std::int64_t i = 0; i < size; ++i) {
    const float v = selection[i];
    if (v > first) {
      second = first;
      first = v;
    } else if (v > second) {
      second = v;
    }
  }
  return top_two ? first + second : first;
}

}  // namespace

// Cut out of one block; the sizes are those of scratch_floats().
struct RowRouter::Scratch {
  float* scores;         // [columns]
  float* selection;      // [columns]
  float* best;           // [max(k, G)] values of a TopKList
  float* group_scores;   // [G]
  std::int32_t* groups;  // [G]
};

std::int64_t RowRouter::scratch_floats() const {
  const std::int64_t groups = spec.num_expert_group;
  return 2 * columns() + std::max(spec.top_k, groups) + 2 * groups;
}

void RowRouter::renormalize_and_scale(float* weights) const {
  const std::int64_t k = spec.top_k;
  if (spec.renormalize && !MOESAIC_FAULT(router_skip_renormalize)) {
    float sum = spec.method == RoutingMethod::kGroupedTopK ? kGroupedDenominator : 0.0F;
    if (!MOESAIC_FAULT(router_skip_epsilon)) sum += static_cast<float>(spec.renorm_epsilon);
    for (std::int64_t j = 0; j < k; ++j) sum += weights[j];
    if (spec.renorm_floor > 0) {
      sum = std::max(sum, static_cast<float>(spec.renorm_floor));
    } else if (sum <= 0) {
      sum = 1;
    }
    for (std::int64_t j = 0; j < k; ++j) weights[j] /= sum;
  }
  if (MOESAIC_FAULT(router_skip_scale)) return;
  for (std::int64_t j = 0; j < k; ++j) weights[j] *= scale;
}

void RowRouter::top_k(const float* logits, const std::vector<float>& selection_bias,
                      const Scratch& scratch, float* weights, std::int32_t* ids) const {
  const std::int64_t n = columns();
  score_row(spec.scoring_func, logits, n, scratch.scores);
  const float* selection = scratch.scores;
  if (!selection_bias.empty()) {
    for (std::int64_t e = 0; e < n; ++e) {
      scratch.selection[e] = scratch.scores[e] + selection_bias[static_cast<std::size_t>(e)];
    }
    selection = scratch.selection;
  }
  TopKList(spec.top_k, scratch.best, ids).offer(selection, 0, n);
  // The bias steers the choice and never the weight.
  const float* weigh = MOESAIC_FAULT(router_bias_in_weights) ? selection : scratch.scores;
  for (std::int64_t j = 0; j < spec.top_k; ++j) weights[j] = weigh[ids[j]];
}

// False when the row has too few candidates: the weights are final then, without renormalisation
// and scale.
bool RowRouter::grouped_top_k(const float* logits, const Scratch& scratch, float* weights,
                              std::int32_t* ids) const {
  const std::int64_t n = columns();
  const std::int64_t groups = spec.num_expert_group;
  const std::int64_t size = n / groups;
  const bool biased = !bias.empty();
  score_row(spec.scoring_func, logits, n, scratch.scores);
  // score_row turns the scores of a NaN row into 0; here such experts are no candidates at all.
  // With softmax one NaN or +inf spoils the row, exactly when no score of the row is positive.
  bool spoiled = false;
  if (spec.scoring_func == ScoringFunc::kSoftmax) {
    spoiled = std::none_of(scratch.scores, scratch.scores + n, [](float s) { return s > 0; });
  }
  for (std::int64_t e = 0; e < n; ++e) {
    if (spoiled || !std::isfinite(logits[e])) {
      scratch.scores[e] = 0;
      scratch.selection[e] = -kInf;
    } else {
      scratch.selection[e] =
          scratch.scores[e] + (biased ? bias[static_cast<std::size_t>(e)] : 0.0F);
    }
  }
  const bool top_two =
      (biased || spec.group_by_best_two) != MOESAIC_FAULT(router_wrong_group_score);
  for (std::int64_t g = 0; g < groups; ++g) {
    scratch.group_scores[g] = group_score(scratch.selection + g * size, size, top_two);
  }
  TopKList(spec.topk_group, scratch.best, scratch.groups).offer(scratch.group_scores, 0, groups);
  if (scratch.best[spec.topk_group - 1] == -kInf) {
    for (std::int64_t j = 0; j < spec.top_k; ++j) {
      ids[j] = static_cast<std::int32_t>(j);
      weights[j] = 1.0F / static_cast<float>(spec.top_k);
    }
    return false;
  }
  // Groups in ascending order, so that ties between groups go to the smaller expert id too.
  std::sort(scratch.groups, scratch.groups + spec.topk_group);
  TopKList list(spec.top_k, scratch.best, ids);
  for (std::int64_t i = 0; i < spec.topk_group; ++i) {
    const std::int64_t g = scratch.groups[i];
    list.offer(scratch.selection, g * size, (g + 1) * size);
  }
  for (std::int64_t j = 0; j < spec.top_k; ++j) weights[j] = scratch.scores[ids[j]];
  return true;
}

// Top-k on the logits themselves; NaN loses against every number.
void RowRouter::raw_top_k(const float* logits, const Scratch& scratch, std::int32_t* ids) const {
  for (std::int64_t e = 0; e < columns(); ++e) {
    scratch.selection[e] = std::isnan(logits[e]) ? -kInf : logits[e];
  }
  TopKList(spec.top_k, scratch.best, ids).offer(scratch.selection, 0, columns());
}

float RowRouter::route(const float* logits, const std::int32_t* table_ids, float* scratch_block,
                       float* weights, std::int32_t* ids) const {
  const std::int64_t n = columns();
  const std::int64_t k = spec.top_k;
  const std::int64_t groups = spec.num_expert_group;
  Scratch scratch{};
  scratch.scores = scratch_block;
  scratch.selection = scratch.scores + n;
  scratch.best = scratch.selection + n;
  scratch.group_scores = scratch.best + std::max(k, groups);
  // Same size and alignment; the block is raw memory and these cells are written before being read.
  scratch.groups = reinterpret_cast<std::int32_t*>(scratch.group_scores + groups);

  switch (spec.method) {
    case RoutingMethod::kTopK:
      top_k(logits, bias, scratch, weights, ids);
      renormalize_and_scale(weights);
      if (expert_scale.empty() || MOESAIC_FAULT(router_forget_expert_scale)) return 0;
      for (std::int64_t j = 0; j < k; ++j) {
        weights[j] *= expert_scale[static_cast<std::size_t>(ids[j])];
      }
      return 0;
    case RoutingMethod::kGroupedTopK:
      if (grouped_top_k(logits, scratch, weights, ids)) renormalize_and_scale(weights);
      return 0;
    case RoutingMethod::kHash:
      if (table_ids == nullptr) {
        top_k(logits, vision_bias, scratch, weights, ids);
      } else {
        score_row(MOESAIC_FAULT(router_hash_of_one_scoring_function) ? ScoringFunc::kSqrtSoftplus
                                                                     : spec.scoring_func,
                  logits, n, scratch.scores);
        for (std::int64_t j = 0; j < k; ++j) {
          ids[j] = table_ids[j];
          weights[j] = scratch.scores[ids[j]];
        }
      }
      renormalize_and_scale(weights);
      return 0;
    case RoutingMethod::kTopKSoftmax: {
      raw_top_k(logits, scratch, ids);
      // Softmax over the selected. exp(inf - inf) and exp(NaN) count as 0 like any NaN score.
      const float max = logits[ids[0]];
      float sum = 0;
      for (std::int64_t j = 0; j < k; ++j) {
        const float e = portable_exp(logits[ids[j]] - max);
        weights[j] = std::isnan(e) ? 0.0F : e;
        sum += weights[j];
      }
      if (sum <= 0) sum = 1;
      for (std::int64_t j = 0; j < k; ++j) weights[j] = weights[j] / sum * scale;
      return 0;
    }
    case RoutingMethod::kLlama4:
      raw_top_k(logits, scratch, ids);
      for (std::int64_t j = 0; j < k; ++j) {
        const float logit = logits[ids[j]];
        weights[j] = std::isnan(logit) ? 0.0F : sigmoid(logit);
      }
      return 0;
    case RoutingMethod::kSparseMixer:
      sparse_mixer_row(logits, n, static_cast<float>(spec.jitter_eps), weights, ids);
      for (std::int64_t j = 0; j < k; ++j) weights[j] *= scale;
      return 0;
    case RoutingMethod::kPNorm: {
      top_k(logits, bias, scratch, weights, ids);
      float norm = p_norm(weights, k, spec.p_norm);
      if (norm <= 0) norm = 1;
      for (std::int64_t j = 0; j < k; ++j) weights[j] = weights[j] / norm * scale;
      return 0;
    }
    case RoutingMethod::kZeroExpert: {
      top_k(logits, bias, scratch, weights, ids);
      renormalize_and_scale(weights);
      float zero_weight = 0;
      for (std::int64_t j = 0; j < k; ++j) {
        if (ids[j] < spec.num_experts) continue;
        zero_weight += weights[j];
        ids[j] = 0;
        weights[j] = 0;
      }
      return MOESAIC_FAULT(router_drop_zero_experts) ? 0.0F : zero_weight;
    }
    case RoutingMethod::kCustom:
    case RoutingMethod::kSimulated:
      break;  // whole batches; see router.cc
  }
  return 0;
}

}  // namespace moesaic::router
