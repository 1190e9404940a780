// The router tensors of a golden file, and their comparison: logits, chosen experts, weights.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gate_oracle.h"
#include "golden.h"
#include "layer_io.h"
#include "routing_oracle.h"

namespace moesaic::tool {

// What <prefix>.gate (or .router) has for a block of M tokens; absent tensors stay empty.
struct GoldenRouter {
  struct Values {
    std::vector<double> numbers;
    DType dtype = DType::kF32;  // in which they were recorded
  };
  std::optional<Values> logits;   // .out0 [M, E + identity experts], or the softmax of them
  std::optional<Values> weights;  // .out1 [M, k]
  std::optional<Tensor> ids;      // .out2 [M, k], as I32
};
// kInvalidShape and kInvalidDType name the tensor; kMissingTensor for weights without ids.
Result<GoldenRouter> read_golden_router(const TensorFile& golden, const std::string& prefix,
                                        std::int64_t tokens, const MoeLayerSpec& spec);

// What the layer did, and how it was asked to round.
struct RouterRun {
  const MoeLayerSpec& spec;
  const LayerOutput& got;
  const Tensor& logits;            // as the router saw them; absent: not compared
  std::span<const double> hidden;  // [M, H]
  double logits_rounding = 0;      // largest relative rounding of a logit, 0: none, they are fp32
};

// Fills the report's logits, weights, mismatches and near ties; returns which tokens leave the
// output comparison. `routing` is absent for methods without an oracle.
std::vector<char> compare_router(const GoldenRouter& golden, const RouterRun& run, GateOracle& gate,
                                 std::optional<RoutingOracle>& routing, LayerReport& report);

}  // namespace moesaic::tool
