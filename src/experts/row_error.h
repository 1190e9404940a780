// What rounding a row of activations leaves, measured by the scalar rules of
// experts/reference/operand.h beside whichever kernel rounds it: the mechanism behind numerics.h.
// Only runs when a trace asks for it.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/experts.h"
#include "moesaic/numerics.h"
#include "moesaic/quant.h"

namespace moesaic::experts {

// Sums over the columns of a row x (or a part of it) and its rounded form q.
struct RowError {
  double size = 0;   // of x^2
  double error = 0;  // of (q - x)^2
  double along = 0;  // of (q - x) * x
  double lost = 0;   // of (q - x)^2 in groups whose largest value is below the smallest normal code
  bool saturated = false;
  bool finite = true;

  void add(const RowError& part);
  double relative2() const { return size > 0 ? error / size : 0.0; }
};

// Measures rows of one projection. Keeps buffers: one object per thread.
class RowErrorMeter {
 public:
  // As MoeProblem::quant.activation; rows are rounded to round_dtype first.
  RowErrorMeter(const OperandQuant& activation, DType round_dtype)
      : activation_(activation), round_dtype_(round_dtype) {}
  // x [n]: whole groups of the format but for the last, a whole row where it has one scale.
  RowError measure(const float* x, std::int64_t n, float input_scale);

 private:
  OperandQuant activation_;
  DType round_dtype_;
  std::vector<float> row_, scales_;
  std::vector<std::uint8_t> codes_;
};

// How the errors of a problem's rows become those of its experts' rows.
struct NoiseModel {
  bool gated = true;
  double bound = 0;  // activation_bound of the problem
  double gain = 1;   // |y|^2 / |h|^2 for weights like those of a fresh model: H / I
  explicit NoiseModel(const MoeProblem& problem);
  // f^2 of numerics.h.
  double relative2(const RowError& input, const RowError& inner) const;
  // One expert's row y [n] that enters the output `factor` times.
  RowNumerics of(const RowError& input, const RowError& inner, const float* y, std::int64_t n,
                 float factor) const;
};

}  // namespace moesaic::experts
