#include "router/ref/ref_router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace moesaic::test {
namespace {

using Doubles = std::vector<double>;

std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }

// Scores and, per expert, how far fp32 may be from them.
void score(ScoringFunc func, const Doubles& l, Doubles& s, Doubles& err) {
  s.resize(l.size());
  err.resize(l.size());
  const double max = *std::max_element(l.begin(), l.end());
  double sum = 0;
  for (const double x : l) sum += std::exp(x - max);
  for (std::size_t e = 0; e < l.size(); ++e) {
    double relative = 0x1p-21;
    if (func == ScoringFunc::kSoftmax) {
      s[e] = std::exp(l[e] - max) / sum;
      relative = (static_cast<double>(l.size()) + (max - l[e]) + 8) * 0x1p-24;
    } else if (func == ScoringFunc::kSigmoid) {
      s[e] = 1 / (1 + std::exp(-l[e]));
    } else {
      s[e] = std::sqrt(l[e] > 20 ? l[e] : std::log1p(std::exp(l[e])));
    }
    err[e] = s[e] * relative + 0x1p-140;
  }
}

// Ids of `allowed`, best value first, smaller id first among equals.
std::vector<std::int32_t> sorted(const Doubles& value, const std::vector<std::int32_t>& allowed) {
  std::vector<std::int32_t> ids = allowed;
  std::stable_sort(ids.begin(), ids.end(),
                   [&](std::int32_t a, std::int32_t b) { return value[at(a)] > value[at(b)]; });
  return ids;
}

// Keeps the first k of a sorted list and lowers `clearance` to the tightest decision made. Experts
// with equal logits and biases tie exactly in any arithmetic; the smaller id decides and is proven.
std::vector<std::int32_t> take(std::vector<std::int32_t> ids, std::int64_t k, const Doubles& value,
                               const Doubles& err, const Doubles& l, const Doubles& bias,
                               double* clearance) {
  const auto n = static_cast<std::size_t>(k);
  for (std::size_t j = 0; j < n && j + 1 < ids.size(); ++j) {
    const std::size_t a = at(ids[j]), b = at(ids[j + 1]);
    if (l[a] == l[b] && (bias.empty() || bias[a] == bias[b])) continue;
    *clearance = std::min(*clearance, (value[a] - value[b]) / (err[a] + err[b]));
  }
  ids.resize(n);
  return ids;
}

std::vector<std::int32_t> iota(std::int64_t n) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

RefRow sparse_mixer(const RoutingSpec& spec, const Doubles& l, RefRow row) {
  std::int32_t first = -1;
  const Doubles exact(l.size(), 0x1p-60);  // logits are exact: only equal ones tie
  const auto order = take(sorted(l, iota(spec.num_experts)), 2, l, exact, l, {}, &row.clearance);
  for (const std::int32_t pick : order) {
    const double m = l[at(pick)];
    double sum = 0;
    for (std::int32_t e = 0; e < static_cast<std::int32_t>(l.size()); ++e) {
      if (e == first) continue;
      const double distance = (m - l[at(e)]) / std::max(std::abs(l[at(e)]), m);
      row.clearance = std::min(row.clearance, std::abs(distance - 2 * spec.jitter_eps) / 0x1p-21);
      if (!(distance > 2 * spec.jitter_eps)) sum += std::exp(l[at(e)] - m);
    }
    row.ids.push_back(pick);
    row.weights.push_back(1 / sum * spec.routed_scaling_factor);
    first = pick;
  }
  return row;
}

}  // namespace

RefRow ref_route(const RoutingSpec& spec, const Doubles& l, const Doubles& bias) {
  RefRow row;
  row.clearance = std::numeric_limits<double>::infinity();
  const double scale = spec.scale_on_output ? 1.0 : spec.routed_scaling_factor;
  if (spec.method == RoutingMethod::kSparseMixer) return sparse_mixer(spec, l, row);

  Doubles s, err;
  score(spec.scoring_func, l, s, err);
  Doubles selection = s, selection_err = err;
  for (std::size_t e = 0; e < bias.size(); ++e) {
    selection[e] += bias[e];
    selection_err[e] += std::abs(selection[e]) * 0x1p-24;
  }
  if (spec.method == RoutingMethod::kTopKSoftmax || spec.method == RoutingMethod::kLlama4) {
    selection = l;
    selection_err.assign(l.size(), 0x1p-60);
  }

  std::vector<std::int32_t> allowed = iota(spec.num_experts);
  if (spec.method == RoutingMethod::kGroupedTopK) {
    const std::int64_t groups = spec.num_expert_group;
    const auto size = static_cast<std::int32_t>(spec.num_experts / groups);
    Doubles group(static_cast<std::size_t>(groups)), group_err(group.size());
    for (std::int32_t g = 0; g < static_cast<std::int32_t>(groups); ++g) {
      std::vector<std::int32_t> members(allowed.begin() + g * size,
                                        allowed.begin() + (g + 1) * size);
      members = sorted(selection, members);
      const std::size_t best = at(members[0]);
      group[at(g)] = selection[best];
      group_err[at(g)] = selection_err[best];
      if (bias.empty() && !spec.group_by_best_two) continue;
      const std::size_t second = at(members[1]);
      group[at(g)] += selection[second];
      group_err[at(g)] += selection_err[second] + std::abs(group[at(g)]) * 0x1p-24;
    }
    // The order among kept groups decides nothing: only the boundary is a decision.
    const auto order = sorted(group, iota(groups));
    const auto kept = static_cast<std::size_t>(spec.topk_group);
    if (kept < order.size()) {
      const std::size_t a = at(order[kept - 1]), b = at(order[kept]);
      row.clearance = (group[a] - group[b]) / (group_err[a] + group_err[b]);
    }
    std::erase_if(allowed, [&](std::int32_t e) {
      return std::find(order.begin(), order.begin() + spec.topk_group, e / size) ==
             order.begin() + spec.topk_group;
    });
  }
  row.ids = take(sorted(selection, allowed), spec.top_k, selection, selection_err, l, bias,
                 &row.clearance);

  for (const std::int32_t id : row.ids) {
    double w = s[at(id)];
    if (spec.method == RoutingMethod::kTopKSoftmax) w = std::exp(l[at(id)] - l[at(row.ids[0])]);
    if (spec.method == RoutingMethod::kLlama4) w = 1 / (1 + std::exp(-l[at(id)]));
    row.weights.push_back(w);
  }
  double denominator = 0;
  if (spec.method == RoutingMethod::kPNorm) {
    for (const double w : row.weights) denominator += std::pow(w, spec.p_norm);
    denominator = std::pow(denominator, 1 / spec.p_norm);
  } else if (spec.renormalize || spec.method == RoutingMethod::kTopKSoftmax) {
    for (const double w : row.weights) denominator += w;
    denominator = std::max(denominator + spec.renorm_epsilon, spec.renorm_floor);
  } else {
    denominator = 1;
  }
  for (double& w : row.weights) w = w / denominator * scale;
  return row;
}

}  // namespace moesaic::test
