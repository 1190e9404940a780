#include "bench_random.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>

#include "bench_draws.h"
#include "core/checked.h"

namespace moesaic::tool {

Result<Tensor> random_tensor(DType dtype, const Shape& shape, double sd, std::uint64_t seed) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor t, Tensor::uninitialized(dtype, shape));
  fill_normal(t, sd, mix(seed));
  return t;
}

std::unique_ptr<ExpertSource> make_random_shared_source(const MoeLayerSpec& spec,
                                                        std::uint64_t seed) {
  if (spec.shared.intermediate_size == 0) return nullptr;
  MoeProblem shared;
  shared.num_experts = shared.num_local_experts = shared.top_k = 1;
  shared.hidden_size = spec.hidden_size;
  shared.intermediate_size = spec.shared.intermediate_size;
  shared.activation = spec.shared.activation.value_or(spec.activation);
  shared.quant = spec.quant;
  return make_random_source(shared, seed + 4);
}

Result<MoeLayerTensors> random_layer_tensors(const MoeLayerSpec& spec, std::uint64_t seed,
                                             std::span<const float> routing_bias) {
  MoeLayerTensors t;
  const std::int64_t logits = spec.routing.num_experts + spec.routing.num_zero_experts;
  const double sd = 1.0 / std::sqrt(static_cast<double>(spec.hidden_size));
  // As such models store it.
  const DType of_gate = spec.activation_dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  MOESAIC_ASSIGN_OR_RETURN(t.gate_weight,
                           random_tensor(of_gate, {logits, spec.hidden_size}, sd, seed + 1));
  if (spec.has_router_bias) {
    MOESAIC_ASSIGN_OR_RETURN(t.gate_bias, random_tensor(DType::kF32, {logits}, 0.1, seed + 2));
    for (std::size_t e = 0; e < routing_bias.size(); ++e) {
      t.gate_bias.as<float>()[e] += routing_bias[e];
    }
  }
  if (spec.routing.has_correction_bias) {
    MOESAIC_ASSIGN_OR_RETURN(t.e_score_correction_bias,
                             random_tensor(DType::kF32, {logits}, 0.05, seed + 3));
  }
  // Factors around one.
  const auto factors = [](std::int64_t count, std::uint64_t from) -> Result<Tensor> {
    MOESAIC_ASSIGN_OR_RETURN(Tensor f, random_tensor(DType::kF32, {count}, 0.1, from));
    for (std::int64_t i = 0; i < count; ++i) f.as<float>()[i] += 1.0F;
    return f;
  };
  if (spec.routing.has_expert_scale) {
    MOESAIC_ASSIGN_OR_RETURN(t.expert_scale, factors(spec.num_experts, seed + 6));
  }
  if (spec.input_norm_eps > 0) {
    MOESAIC_ASSIGN_OR_RETURN(t.experts_norm_weight, factors(spec.hidden_size, seed + 7));
  }
  if (spec.shared.gated_output) {
    MOESAIC_ASSIGN_OR_RETURN(t.shared_gate_weight,
                             random_tensor(DType::kBF16, {1, spec.hidden_size}, sd, seed + 5));
  }
  return t;
}

namespace {

struct RoutingKind {
  bool one = false;
  double exponent = 0;  // of the Zipf law; 0: uniform
};

Result<RoutingKind> parse_routing(std::string_view kind) {
  if (kind == "uniform") return RoutingKind{};
  if (kind == "one") return RoutingKind{.one = true};
  const std::string text(kind);
  char* end = nullptr;
  double exponent = 0;
  if (text.rfind("zipf:", 0) == 0) exponent = std::strtod(text.c_str() + 5, &end);
  if (end == nullptr || *end != '\0' || end == text.c_str() + 5 ||
      !(exponent >= 0 && exponent <= 10)) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("--routing: got '{}', need uniform, one or zipf:S with S from 0 to 10", kind));
  }
  return RoutingKind{.one = false, .exponent = exponent};
}

// Experts from the most to the least popular: the same for all routings of a run.
std::vector<std::int32_t> popularity_order(std::int64_t num_experts) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[mix(i) % i]);
  return order;
}

}  // namespace

Status check_routing_name(std::string_view kind) { return parse_routing(kind).status(); }

Result<std::vector<float>> routing_bias(std::string_view kind, std::int64_t num_experts,
                                        std::int64_t num_logits, std::int64_t top_k) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingKind routing, parse_routing(kind));
  std::vector<float> bias;
  if (!routing.one && routing.exponent == 0) return bias;
  bias.resize(static_cast<std::size_t>(num_logits), 0.0F);
  const std::vector<std::int32_t> order = popularity_order(num_experts);
  for (std::size_t r = 0; r < order.size(); ++r) {
    const auto e = static_cast<std::size_t>(order[r]);
    if (routing.one) {
      bias[e] = static_cast<std::int64_t>(e) < top_k ? 0.0F : -30.0F;
    } else {
      bias[e] = static_cast<float>(-routing.exponent * std::log(static_cast<double>(r + 1)));
    }
  }
  return bias;
}

Result<Routing> random_routing(std::string_view kind, std::int64_t tokens, std::int64_t num_experts,
                               std::int64_t top_k, std::uint64_t seed) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingKind routing, parse_routing(kind));
  Routing r;
  MOESAIC_ASSIGN_OR_RETURN(r.ids, Tensor::uninitialized(DType::kI32, {tokens, top_k}));
  MOESAIC_ASSIGN_OR_RETURN(r.weights, Tensor::uninitialized(DType::kF32, {tokens, top_k}));
  const std::vector<std::int32_t> order = popularity_order(num_experts);
  std::vector<double> key(order.size());
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int32_t* ids = r.ids.as<std::int32_t>() + t * top_k;
    // Exponential keys: the k smallest of -log(u) / p are a draw without replacement with
    // probabilities p.
    for (std::size_t i = 0; i < key.size(); ++i) {
      const std::uint64_t h = mix(mix(seed + static_cast<std::uint64_t>(t)) + i);
      key[i] = -std::log(1.0 - unit(h)) * std::pow(static_cast<double>(i + 1), routing.exponent);
    }
    std::vector<std::int32_t> by_key(order.size());
    std::iota(by_key.begin(), by_key.end(), 0);
    std::partial_sort(by_key.begin(), by_key.begin() + top_k, by_key.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return key[static_cast<std::size_t>(a)] < key[static_cast<std::size_t>(b)];
                      });
    float sum = 0;
    for (std::int64_t j = 0; j < top_k; ++j) {
      ids[j] = routing.one ? static_cast<std::int32_t>(j)
                           : order[static_cast<std::size_t>(by_key[static_cast<std::size_t>(j)])];
      const double u = unit(mix(mix(seed ^ 77) + static_cast<std::uint64_t>(t * top_k + j)));
      r.weights.as<float>()[t * top_k + j] = static_cast<float>(0.5 + u);
      sum += r.weights.as<float>()[t * top_k + j];
    }
    for (std::int64_t j = 0; j < top_k; ++j) r.weights.as<float>()[t * top_k + j] /= sum;
  }
  return r;
}

}  // namespace moesaic::tool
