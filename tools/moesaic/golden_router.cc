#include "golden_router.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/refusal.h"

namespace moesaic::tool {
namespace {

// Of an fp32 gate, relative to the sums of magnitudes of its logits, and of an fp32 router on given
// logits, relative to its weights: the bound of `f32` (docs/accuracy.md).
constexpr double kF32Bound = 2e-6;

double rounding_in(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 ? 0.0 : rounding_of(dtype);
}

// The name that the file has for an output of the block's router, or nothing.
std::optional<std::string> router_name(const TensorFile& golden, const std::string& prefix,
                                       const char* output) {
  for (const char* module : {".gate", ".router"}) {
    std::string name = prefix + module + output;
    if (golden.contains(name)) return name;
  }
  return std::nullopt;
}

Result<GoldenRouter::Values> read_values(const TensorFile& golden, const std::string& name,
                                         const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(const Tensor tensor, golden.read(name));
  MOESAIC_RETURN_IF_ERROR(expect_shape(name, tensor.view(), shape));
  GoldenRouter::Values values{to_doubles(tensor.view()), tensor.dtype()};
  if (values.numbers.empty() && tensor.bytes() > 0) {
    return Status(StatusCode::kInvalidDType, fmt::format("{}: got {}, need a floating dtype", name,
                                                         dtype_name(tensor.dtype())));
  }
  return values;
}

Result<Tensor> read_ids(const TensorFile& golden, const std::string& name, const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor ids, golden.read(name));
  MOESAIC_RETURN_IF_ERROR(expect_shape(name, ids.view(), shape));
  if (ids.dtype() == DType::kI32) return ids;
  if (ids.dtype() != DType::kI64) {
    return Status(StatusCode::kInvalidDType,
                  fmt::format("{}: got {}, need I32 or I64", name, dtype_name(ids.dtype())));
  }
  MOESAIC_ASSIGN_OR_RETURN(Tensor narrow, Tensor::uninitialized(DType::kI32, shape));
  for (std::int64_t i = 0; i < shape[0] * shape[1]; ++i) {
    const std::int64_t id = ids.as<std::int64_t>()[i];
    const bool fits = id >= 0 && id <= std::numeric_limits<std::int32_t>::max();
    narrow.as<std::int32_t>()[i] = fits ? static_cast<std::int32_t>(id) : -1;
  }
  return narrow;
}

// Sums of squares of errors, of what they may be, and of what was recorded.
struct Sums {
  double error = 0, allowed = 0, want = 0;

  void add(double got, double wanted, double may_differ) {
    error += (got - wanted) * (got - wanted);
    if (!std::isfinite(wanted)) return;  // the error is not either, and the bound stays a number
    allowed += may_differ * may_differ;
    want += wanted * wanted;
  }
  Comparison comparison() const {
    const double size = std::sqrt(want);
    const auto relative = [&](double norm) { return norm == 0 ? 0.0 : norm / size; };
    return {relative(std::sqrt(error)), relative(std::sqrt(allowed))};
  }
};

std::vector<double> softmax(std::span<const double> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> scores;
  double sum = 0;
  for (const double logit : logits) sum += scores.emplace_back(std::exp(logit - top));
  for (double& score : scores) score /= sum;
  return scores;
}

// The slots of a token: expert and weight, in an order of their own. Identity experts, which some
// record by number and others as expert 0 with weight 0, are all -1.
using Slots = std::vector<std::pair<std::int32_t, double>>;
Slots sorted(Slots slots, const MoeLayerSpec& spec) {
  if (spec.routing.num_zero_experts > 0) {
    for (auto& [id, weight] : slots) {
      if (id >= spec.num_experts || (id <= 0 && weight == 0)) id = -1;
      if (id < 0) weight = 0;
    }
  }
  std::sort(slots.begin(), slots.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return slots;
}
bool same_experts(const Slots& a, const Slots& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
}

std::vector<std::int32_t> ids_of(const Slots& slots) {
  std::vector<std::int32_t> ids;
  for (const auto& slot : slots) ids.push_back(slot.first);
  return ids;
}

class RouterComparison {
 public:
  RouterComparison(const GoldenRouter& golden, const RouterRun& run, GateOracle& gate,
                   std::optional<RoutingOracle>& routing, LayerReport& report)
      : golden_(golden), run_(run), gate_(gate), routing_(routing), report_(report) {
    const double recorded = golden.logits ? rounding_in(golden.logits->dtype) : 0.0;
    // Either side may have rounded to its own dtype, the recorded one at least to the layer's.
    rounding_ = run.logits_rounding + std::max(run.logits_rounding, recorded);
  }

  // Whether the token's output is that of other experts, legitimately.
  bool compare(std::size_t token) {
    const auto width = static_cast<std::size_t>(run_.spec.hidden_size);
    const std::span<const double> hidden = run_.hidden.subspan(token * width, width);
    const bool logits = golden_.logits && run_.logits.present();
    if (logits || golden_.weights) gate_.set_token(hidden);
    if (logits) compare_logits(token);
    return compare_choice(token, hidden);
  }

  void finish() {
    if (golden_.logits && run_.logits.present()) {
      const Comparison raw = logits_.comparison(), scores = scores_.comparison();
      report_.router_logits = scores.pass() && !raw.pass() ? scores : raw;
    }
    if (golden_.weights) report_.topk_weights = weights_.comparison();
  }

 private:
  double logit_may_differ(std::size_t e) const {
    return kF32Bound * gate_.magnitudes()[e] + rounding_ * std::abs(gate_.values()[e]);
  }
  // Of a score or weight recorded in this dtype, relative to it. Scores and their sums move by no
  // more than a factor of e^d where logits move by d; a quotient of two by e^2d.
  double score_may_differ(DType recorded) const {
    double widest = 0;
    for (std::size_t e = 0; e < gate_.num_logits(); ++e) {
      widest = std::max(widest, logit_may_differ(e));
    }
    return std::expm1(2 * widest) + kF32Bound + rounding_in(recorded);
  }

  void compare_logits(std::size_t token) {
    const std::size_t experts = gate_.num_logits();
    std::vector<double> got(experts);
    for (std::size_t e = 0; e < experts; ++e) {
      const double want = golden_.logits->numbers[token * experts + e];
      got[e] = run_.logits.as<float>()[token * experts + e];
      logits_.add(got[e], want, logit_may_differ(e));
    }
    // Routers that return the softmax call it logits too.
    const std::vector<double> scores = softmax(got);
    const double factor = score_may_differ(golden_.logits->dtype);
    for (std::size_t e = 0; e < experts; ++e) {
      const double want = golden_.logits->numbers[token * experts + e];
      scores_.add(scores[e], want, factor * std::abs(want));
    }
  }

  bool compare_choice(std::size_t token, std::span<const double> hidden) {
    const auto top_k = static_cast<std::size_t>(run_.got.topk_ids.shape()[1]);
    Slots ours, theirs;
    for (std::size_t i = token * top_k; i < (token + 1) * top_k; ++i) {
      ours.emplace_back(run_.got.topk_ids.as<std::int32_t>()[i],
                        run_.got.topk_weights.as<float>()[i]);
      if (!golden_.ids) continue;
      theirs.emplace_back(golden_.ids->as<std::int32_t>()[i],
                          golden_.weights ? golden_.weights->numbers[i] : 1.0);
    }
    ours = sorted(std::move(ours), run_.spec);
    theirs = sorted(golden_.ids ? std::move(theirs) : ours, run_.spec);
    if (golden_.ids && same_experts(ours, theirs)) {
      if (golden_.weights) compare_weights(ours, theirs);
      return false;
    }
    if (!golden_.ids && !routing_) return false;
    bool explained = false;
    if (routing_) {
      routing_->set_token(hidden, run_.logits_rounding);
      explained = routing_->possible(ids_of(ours)) && routing_->possible(ids_of(theirs));
    }
    if (!explained) {
      ++report_.topk_mismatches;
      return false;
    }
    if (golden_.ids) ++report_.near_ties;
    return golden_.ids.has_value();
  }

  void compare_weights(const Slots& ours, const Slots& theirs) {
    const double factor = score_may_differ(golden_.weights->dtype);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const double got = ours[i].second, want = theirs[i].second;
      weights_.add(got, want, factor * std::abs(want));
      keep_worst(report_.topk_weight_max_abs, std::abs(got - want));
    }
  }

  const GoldenRouter& golden_;
  const RouterRun& run_;
  GateOracle& gate_;
  std::optional<RoutingOracle>& routing_;
  LayerReport& report_;
  double rounding_ = 0;
  Sums logits_, scores_, weights_;
};

}  // namespace

Result<GoldenRouter> read_golden_router(const TensorFile& golden, const std::string& prefix,
                                        std::int64_t tokens, const MoeLayerSpec& spec) {
  GoldenRouter router;
  const Shape slots{tokens, spec.routing.top_k};
  if (const auto name = router_name(golden, prefix, ".out2")) {
    MOESAIC_ASSIGN_OR_RETURN(router.ids, read_ids(golden, *name, slots));
  }
  if (const auto name = router_name(golden, prefix, ".out1")) {
    MOESAIC_ASSIGN_OR_RETURN(router.weights, read_values(golden, *name, slots));
    if (!router.ids) {
      return Status(
          StatusCode::kMissingTensor,
          fmt::format("{}: got weights without .out2, need the experts that they are of", *name));
    }
  }
  if (const auto name = router_name(golden, prefix, ".out0")) {
    const std::int64_t columns = spec.num_experts + spec.routing.num_zero_experts;
    MOESAIC_ASSIGN_OR_RETURN(router.logits, read_values(golden, *name, {tokens, columns}));
  }
  return router;
}

std::vector<char> compare_router(const GoldenRouter& golden, const RouterRun& run, GateOracle& gate,
                                 std::optional<RoutingOracle>& routing, LayerReport& report) {
  std::vector<char> excluded(static_cast<std::size_t>(report.tokens), 0);
  report.topk_source = golden.ids ? "golden" : routing ? "float64" : "none";
  RouterComparison comparison(golden, run, gate, routing, report);
  for (std::size_t token = 0; token < excluded.size(); ++token) {
    excluded[token] = comparison.compare(token) ? 1 : 0;
  }
  comparison.finish();
  return excluded;
}

}  // namespace moesaic::tool
