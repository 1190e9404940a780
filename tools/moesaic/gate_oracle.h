// Router logits in float64 from a checkpoint's own gate, with what an fp32 gate may differ by.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::tool {

inline constexpr double kF32Rounding = 0x1p-24;  // largest relative error of one

class GateOracle {
 public:
  // Copies the gate. kInvalidShape when its tensors are not what the spec says.
  static Result<GateOracle> create(const MoeLayerSpec& spec, const MoeLayerTensors& tensors);

  std::size_t num_logits() const { return values_.size(); }
  // Computes the logits of one token. hidden_state [H].
  void set_token(std::span<const double> hidden_state);

  // Of the current token, one per expert (identity experts included): the logits, the sums of the
  // magnitudes of which they are made (sum |x w| + |bias|), and the proven bound of an fp32 gate's
  // error.
  std::span<const double> values() const { return values_; }
  std::span<const double> magnitudes() const { return magnitudes_; }
  std::span<const double> margins() const { return margins_; }

 private:
  GateOracle() = default;

  double input_norm_eps_ = 0;
  std::vector<double> weight_, bias_;  // [E, H], [E] or empty
  std::vector<double> values_, magnitudes_, margins_;
};

}  // namespace moesaic::tool
