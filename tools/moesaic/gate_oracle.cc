#include "gate_oracle.h"

#include <fmt/format.h>

#include <cmath>

#include "layer_io.h"

namespace moesaic::tool {

Result<GateOracle> GateOracle::create(const MoeLayerSpec& spec, const MoeLayerTensors& tensors) {
  GateOracle oracle;
  oracle.input_norm_eps_ = spec.input_norm_eps;
  oracle.weight_ = to_doubles(tensors.gate_weight.view());
  if (tensors.gate_bias.present()) oracle.bias_ = to_doubles(tensors.gate_bias.view());
  const auto logits = static_cast<std::size_t>(spec.num_experts + spec.routing.num_zero_experts);
  const auto hidden = static_cast<std::size_t>(spec.hidden_size);
  if (oracle.weight_.size() != logits * hidden ||
      (!oracle.bias_.empty() && oracle.bias_.size() != logits)) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("gate weight: got {}, need [{}, {}] with a bias of [{}]",
                              tensors.gate_weight.shape().to_string(), logits, hidden, logits));
  }
  for (auto* numbers : {&oracle.values_, &oracle.magnitudes_, &oracle.margins_}) {
    numbers->resize(logits);
  }
  return oracle;
}

void GateOracle::set_token(std::span<const double> hidden_state) {
  double norm = 1;
  if (input_norm_eps_ > 0) {
    double squares = 0;
    for (const double x : hidden_state) squares += x * x;
    norm = 1 / std::sqrt(squares / static_cast<double>(hidden_state.size()) + input_norm_eps_);
  }
  // The bound that GateLinear documents, with the normalised row's, and one rounding of the bias.
  const double roundings = static_cast<double>(hidden_state.size()) + (input_norm_eps_ > 0 ? 4 : 0);
  for (std::size_t e = 0; e < values_.size(); ++e) {
    const double* row = weight_.data() + e * hidden_state.size();
    double sum = 0, magnitude = 0;
    for (std::size_t h = 0; h < hidden_state.size(); ++h) {
      const double product = norm * hidden_state[h] * row[h];
      sum += product;
      magnitude += std::abs(product);
    }
    margins_[e] = roundings * kF32Rounding * magnitude;
    if (!bias_.empty()) {
      sum += bias_[e];
      magnitude += std::abs(bias_[e]);
      margins_[e] += kF32Rounding * (std::abs(sum) + std::abs(bias_[e]));
    }
    values_[e] = sum;
    magnitudes_[e] = magnitude;
  }
}

}  // namespace moesaic::tool
