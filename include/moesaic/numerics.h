// RowNumerics: what rounding and quantising activations did to the rows of one call, measured where
// it happens, and whether the bound that the scheme states holds for them. Ask for it with
// FusedMoE::Trace::numerics.
//
// The estimate. A scheme rounds a row twice: hidden states x before GEMM1, the activation's result
// h before GEMM2. Each rounding leaves a relative error e = |q(x) - x| / |x|, of which a = (q(x) -
// x).x / |x|^2 lies along the row itself: it moves gate and up together, the rest moves them apart.
//   f^2 = (2.3 a1)^2 + (1.6)^2 (e1^2 - a1^2) + e2^2      gated; not gated: 2 in both places
// estimates the relative error of an expert's row. For normal data it is what is measured (3e-2 for
// int8 at 7168 columns, 5e-2 for e4m3); an outlier, a saturated or a lost value enters through e.
// It assumes that the weights' columns are of similar size: where those of an outlier's channel are
// ten times smaller than the others, the error relative to the output may be ten times larger.
// Where gate and up lie beyond the activation's limits the rest of the columns carries all of the
// error: with a share s of such columns 1.6^2 becomes 1.6^2 / (1 - 2 s), f^2 at most 1.9 e. Entries of
// nf4's table in BF16 add their rounding, and their mean times the row's.
// Source: docs/accuracy.md, section "When a bound holds".
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/quant.h"

namespace moesaic {

enum RowNumericsFlag : std::uint32_t {
  // A value lay outside what its scale can express and was clamped: static scales.
  kRowSaturated = 1U << 0,
  // Values were lost below the smallest normal code, and with them more of the row than rounding
  // takes: a scale at its lower end, F16 below 2^-14, static scales that are too large.
  kRowFlushed = 1U << 1,
  // NaN or infinity in the hidden states, the intermediate, an expert's row or a layer's output; of a
  // layer's own gate also logits that are NaN, +infinity or all -infinity.
  kRowNotFinite = 1U << 2,
  // The error estimate f of one of its expert rows is above 1.5 times the scheme's bound.
  kRowBeyondBound = 1U << 3,
};

// One row [H] of the output.
struct RowNumerics {
  // Sum over everything that is added into the row of |weight * expert row|^2 ...
  double size = 0;
  // ... and of the squared error that rounding the activations is estimated to leave there. A part
  // that is not finite is in neither, and has its flag.
  double noise = 0;
  std::uint32_t flags = 0;  // RowNumericsFlag

  void add(const RowNumerics& part, double factor = 1.0);
};

// All rows of a call (or of several: add them up).
struct NumericsSummary {
  std::int64_t rows = 0;
  std::int64_t saturated = 0, flushed = 0, not_finite = 0, beyond_bound = 0;  // rows of each kind
  std::int64_t outside = 0;                                                   // rows with any flag
  double size = 0, noise = 0;
  double squares = 0;  // of the rows' sizes

  void add(const RowNumerics& row);
  void add(const NumericsSummary& other);
  // Root of noise / size: the estimated relative L2 error; 0 without rows, infinity: none is finite.
  double error_estimate() const;
  // How many rows of one size would scatter as these do: size^2 / squares, at most all of them. A row
  // that is as large as all others together counts for nearly half.
  double effective_rows() const;
  // The condition of the documented bound holds: no row is outside and the estimate is within it.
  bool within(double activation_bound) const;
};
NumericsSummary summarize(std::span<const RowNumerics> rows);

// The part of Scheme::output_bound that is due to the activations: the documented bound of a
// scheme whose weights are exact as stored. int8 grows with the intermediate size, since the
// largest of more products stretches the one scale of a row.
double activation_bound(const OperandQuant& activation, std::int64_t intermediate_size);
// Scheme::output_bound for a layer of this intermediate size (of one rank).
double output_bound(const Scheme& scheme, std::int64_t intermediate_size);

// What a router weight that is rounded to the rows' dtype before it multiplies them
// (apply_router_weight_on_input) may add to it, in quadrature: an error of all of the row, half a
// unit in the last place of the weight at most, and as much of products that all round alike. 0
// where rows are F32.
double weight_on_input_bound(DType rows);

// Scheme::output_bound is that of an output in F32 (BF16, F16 from 6e-3, 1e-3 on, which contain it).
// With the rounding to `output` in quadrature, half a unit in the last place, for smaller ones.
double with_output_rounding(double bound, DType output);

// A bound of the relative L2 error made for one call from what its rows show.
//   bound       Scheme::output_bound of the layer (weights that were converted included)
//   activation  activation_bound of it
// The documented one, or 1.15 times the estimate where that is more, while the estimate is within it
// (of fewer than 16 rows or 8 effective ones, which scatter, 1.3 times the estimate); else the
// estimate with a margin of half; the weights' part in quadrature. Above kLargestUsefulBound, or with
// rows that are not finite, there is none: infinity. Calls of few numbers scatter more:
// docs/accuracy.md.
double computed_bound(double bound, double activation, const NumericsSummary& summary);
inline constexpr double kLargestUsefulBound = 0.5;

}  // namespace moesaic
