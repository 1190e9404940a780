// What rounding a row of activations leaves, measured by the scalar rules of
// experts/reference/operand.h beside whichever kernel rounds it: the mechanism behind numerics.h.
// Only runs when a trace asks for it.
#pragma once

#include <array>
#include <cmath>
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
  double sum = 0;    // of x
  std::int64_t columns = 0;
  std::int64_t clamped =
      0;  // of an intermediate: columns whose gate and up are beyond their limits
  bool saturated = false;
  bool finite = true;

  void add(const RowError& part);
  double relative2() const { return size > 0 ? error / size : 0.0; }
};

// Tells intermediate values whose gate and up are both beyond the activation's limits: they are what
// the activation makes of the limits. `tolerance`, relative: how far rounding may have moved them.
class ClampedValues {
 public:
  explicit ClampedValues(const ActivationSpec& activation, double tolerance = 0.07);
  bool contains(double value) const {
    const double size = std::abs(value);
    return (size >= low_[0] && size <= high_[0]) || (size >= low_[1] && size <= high_[1]);
  }

 private:
  std::array<double, 2> low_{1, 1}, high_{0, 0};  // empty: the activation has no limits
};

// Measures rows of one projection. Keeps buffers: one object per thread.
class RowErrorMeter {
 public:
  // As MoeProblem::quant.activation; rows are rounded to round_dtype first.
  RowErrorMeter(const MoeProblem& problem, DType round_dtype)
      : activation_(problem.quant.activation),
        clamped_(problem.activation),
        round_dtype_(round_dtype) {}
  // x [n]: whole groups of the format but for the last, a whole row where it has one scale.
  // exact [n]: what x was before earlier roundings, which then count; null: x.
  RowError measure(const float* x, std::int64_t n, float input_scale, const float* exact = nullptr);

 private:
  OperandQuant activation_;
  ClampedValues clamped_;
  DType round_dtype_;
  std::vector<float> row_, scales_;
  std::vector<std::uint8_t> codes_;
};

// How the errors of a problem's rows become those of its experts' rows.
struct NoiseModel {
  bool gated = true;
  double bound = 0;  // activation_bound of the problem
  double gain = 1;   // |y|^2 / |h|^2 for weights like those of a fresh model: H / I
  double table_error = 0,
         table_bias = 0;  // of a table's entries in BF16: RMS and mean, to their RMS
  explicit NoiseModel(const MoeProblem& problem);
  // f^2 of numerics.h.
  double relative2(const RowError& input, const RowError& inner) const;
  // Parts of it: where columns are clamped, an error `across` hidden states instead of its usual
  // part; table entries that are rounded, beside the others.
  double of_clamped(double across, const RowError& inner) const;
  double of_table(const RowError& input) const;
  // One expert's row y [n] that enters the output `factor` times.
  RowNumerics of(const RowError& input, const RowError& inner, const float* y, std::int64_t n,
                 float factor) const;
};

}  // namespace moesaic::experts
