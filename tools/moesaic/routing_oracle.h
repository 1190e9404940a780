// Which experts a token may choose: the routing rule in float64 on a checkpoint's own gate, with a
// bound on how far a correct fp32 router can be off. It decides whether two different choices are
// both legitimate (a proven near-tie) or one of them is wrong.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "gate_oracle.h"
#include "moesaic/checkpoint.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::tool {

class RoutingOracle {
 public:
  // Copies the gate. kUnsupported for routing methods whose choice is not a function of scores
  // alone (hash, custom, simulated, sparse mixer, zero experts).
  static Result<RoutingOracle> create(const MoeLayerSpec& spec, const MoeLayerTensors& tensors);

  // Scores one token. hidden_state [H].
  //   logits_rounding  relative: of logits that are rounded before they are scored
  void set_token(std::span<const double> hidden_state, double logits_rounding = 0);
  // Could a router that computes within the margins choose exactly these experts for the token?
  // False for a wrong count, duplicates, ids out of range, and where scores are not finite.
  bool possible(std::span<const std::int32_t> ids) const;

  // Of the current token: selection scores and how far a computed one may be off, [E].
  std::span<const double> scores() const { return scores_; }
  std::span<const double> margins() const { return margins_; }

 private:
  explicit RoutingOracle(GateOracle gate) : gate_(std::move(gate)) {}
  bool possible_in(std::span<const std::int32_t> ids, std::span<const char> allowed) const;
  void score_from_logits(std::span<const double> logits, std::span<const double> logit_margins);

  GateOracle gate_;
  RoutingSpec routing_;
  std::vector<double> correction_;  // [E] or empty
  std::vector<double> scores_, margins_;
};

}  // namespace moesaic::tool
