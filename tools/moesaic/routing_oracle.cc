#include "routing_oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "layer_io.h"

namespace moesaic::tool {
namespace {

// Scoring functions in fp32: exp, division and square root, each good to a few units in the last
// place.
constexpr double kScoringRounding = 16 * kF32Rounding;

bool scores_are_logits(RoutingMethod method) {
  return method == RoutingMethod::kTopKSoftmax || method == RoutingMethod::kLlama4;
}

bool is_known(RoutingMethod method) {
  return scores_are_logits(method) || method == RoutingMethod::kTopK ||
         method == RoutingMethod::kGroupedTopK || method == RoutingMethod::kPNorm;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }

}  // namespace

Result<RoutingOracle> RoutingOracle::create(const MoeLayerSpec& spec,
                                            const MoeLayerTensors& tensors) {
  if (!is_known(spec.routing.method) || spec.routing.num_zero_experts != 0) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("routing method {}: no float64 oracle for its choice",
                              routing_method_name(spec.routing.method)));
  }
  MOESAIC_ASSIGN_OR_RETURN(GateOracle gate, GateOracle::create(spec, tensors));
  RoutingOracle oracle(std::move(gate));
  oracle.routing_ = spec.routing;
  if (tensors.e_score_correction_bias.present()) {
    oracle.correction_ = to_doubles(tensors.e_score_correction_bias.view());
  }
  const std::size_t experts = oracle.gate_.num_logits();
  if (!oracle.correction_.empty() && oracle.correction_.size() != experts) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("e_score_correction_bias: got {}, need [{}]",
                              tensors.e_score_correction_bias.shape().to_string(), experts));
  }
  oracle.scores_.resize(experts);
  oracle.margins_.resize(experts);
  return oracle;
}

void RoutingOracle::set_token(std::span<const double> hidden_state, double logits_rounding) {
  gate_.set_token(hidden_state);
  const std::span<const double> logits = gate_.values();
  std::vector<double> margins(gate_.margins().begin(), gate_.margins().end());
  for (std::size_t e = 0; e < margins.size(); ++e) {
    margins[e] += logits_rounding * std::abs(logits[e]);
  }
  score_from_logits(logits, margins);
}

void RoutingOracle::score_from_logits(std::span<const double> logits,
                                      std::span<const double> logit_margins) {
  const std::size_t experts = scores_.size();
  const double top = *std::max_element(logits.begin(), logits.end());
  const double widest = *std::max_element(logit_margins.begin(), logit_margins.end());
  double denominator = 0;
  for (const double logit : logits) denominator += std::exp(logit - top);
  for (std::size_t e = 0; e < experts; ++e) {
    double score = logits[e];
    double margin = logit_margins[e];
    if (!scores_are_logits(routing_.method)) {
      switch (routing_.scoring_func) {
        case ScoringFunc::kSoftmax:
          // Numerator and denominator each move by at most e^widest.
          score = std::exp(logits[e] - top) / denominator;
          margin = score * (std::expm1(2 * widest) + kScoringRounding +
                            static_cast<double>(experts) * kF32Rounding);
          break;
        case ScoringFunc::kSigmoid:
          score = sigmoid(logits[e]);
          margin = 0.25 * margin + kScoringRounding * score;
          break;
        case ScoringFunc::kSqrtSoftplus:
          // The slope sigmoid(x) / (2 sqrt(softplus(x))) stays below 0.4.
          score = std::sqrt(softplus(logits[e]));
          margin = 0.4 * margin + kScoringRounding * score;
          break;
      }
    }
    if (!correction_.empty()) {
      score += correction_[e];
      margin += kF32Rounding * std::abs(score);
    }
    scores_[e] = score;
    margins_[e] = margin;
  }
}

// Can `ids` win among the allowed experts: even the lowest of them, raised by its margin, reaches
// every other one lowered by its own?
bool RoutingOracle::possible_in(std::span<const std::int32_t> ids,
                                std::span<const char> allowed) const {
  std::vector<char> chosen(scores_.size(), 0);
  double lowest = INFINITY;
  for (const std::int32_t id : ids) {
    const auto e = static_cast<std::size_t>(id);
    if (allowed[e] == 0) return false;
    chosen[e] = 1;
    lowest = std::min(lowest, scores_[e] + margins_[e]);
  }
  for (std::size_t e = 0; e < scores_.size(); ++e) {
    if (allowed[e] != 0 && chosen[e] == 0 && scores_[e] - margins_[e] > lowest) return false;
  }
  return true;
}

bool RoutingOracle::possible(std::span<const std::int32_t> ids) const {
  const std::size_t experts = scores_.size();
  if (static_cast<std::int64_t>(ids.size()) != routing_.top_k) return false;
  // Of what is no number everything could be said.
  const auto is_number = [](double v) { return std::isfinite(v); };
  if (!std::all_of(scores_.begin(), scores_.end(), is_number) ||
      !std::all_of(margins_.begin(), margins_.end(), is_number)) {
    return false;
  }
  std::vector<char> seen(experts, 0);
  for (const std::int32_t id : ids) {
    if (id < 0 || static_cast<std::size_t>(id) >= experts) return false;
    if (seen[static_cast<std::size_t>(id)]++ != 0) return false;
  }
  std::vector<char> allowed(experts, 1);
  const auto groups = static_cast<std::size_t>(routing_.num_expert_group);
  if (routing_.method != RoutingMethod::kGroupedTopK || groups <= 1 || experts % groups != 0) {
    return possible_in(ids, allowed);
  }

  // Group scores: the best member, or with a bias the sum of the two best. Both move by no more
  // than the widest margin of a member, once or twice.
  const std::size_t size = experts / groups;
  std::vector<double> score(groups), margin(groups);
  for (std::size_t g = 0; g < groups; ++g) {
    const auto begin = scores_.begin() + static_cast<std::ptrdiff_t>(g * size);
    std::vector<double> members(begin, begin + static_cast<std::ptrdiff_t>(size));
    std::sort(members.rbegin(), members.rend());
    const double widest =
        *std::max_element(margins_.begin() + static_cast<std::ptrdiff_t>(g * size),
                          margins_.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
    const bool sum_of_two = (!correction_.empty() || routing_.group_by_best_two) && size >= 2;
    score[g] = members[0] + (sum_of_two ? members[1] : 0.0);
    margin[g] = (sum_of_two ? 2 : 1) * widest + kF32Rounding * std::abs(score[g]);
  }
  // Keep the groups that the choice needs, then the best of the others.
  std::vector<char> needed(groups, 0);
  for (const std::int32_t id : ids) needed[static_cast<std::size_t>(id) / size] = 1;
  std::vector<std::size_t> order(groups);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (needed[a] != needed[b]) return needed[a] > needed[b];
    return score[a] > score[b];
  });
  const auto kept = static_cast<std::size_t>(routing_.topk_group);
  if (static_cast<std::size_t>(std::count(needed.begin(), needed.end(), 1)) > kept) return false;
  double lowest = INFINITY;
  for (std::size_t i = 0; i < kept; ++i)
    lowest = std::min(lowest, score[order[i]] + margin[order[i]]);
  for (std::size_t i = kept; i < groups; ++i) {
    if (score[order[i]] - margin[order[i]] > lowest) return false;
    for (std::size_t e = order[i] * size; e < (order[i] + 1) * size; ++e) allowed[e] = 0;
  }
  return possible_in(ids, allowed);
}

}  // namespace moesaic::tool
