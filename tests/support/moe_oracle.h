// Float64 oracle of the experts stage: every sum, activation and combination in double, written
// independently of src/ (its own codecs, quantiser and activations).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moesaic/experts.h"
#include "moesaic/tensor.h"
#include "support/random_experts.h"  // what the oracle is asked about

namespace moesaic::test {

struct OracleOptions {
  // false: exact arithmetic on the weights as stored and the hidden states as given; nothing is
  //        rounded. What Scheme::output_bound is relative to.
  // true:  hidden states, a weight on the input and the activation's result are rounded and
  //        quantised exactly as the scheme says (operands equal those of a backend except where
  //        fp32 and float64 sums land on different sides of a rounding boundary); sums stay double.
  bool round_like_scheme = false;
};

// `columns` elements of a tensor from element `offset` on.
std::vector<double> oracle_row(ConstTensorView t, std::int64_t offset, std::int64_t columns);

bool oracle_is_gated(const MoeProblem& problem);

// One expert on one row: x [H] -> [H], biases included, no router weight.
//   scale_input  weight on input (1: none)
std::vector<double> oracle_expert(const MoeProblem& problem, const StackedExpertWeights& weights,
                                  std::int64_t local_expert, std::span<const double> x,
                                  double scale_input, const OracleOptions& options);

// The same of an expert whose weights are decoded once, and in steps. problem and weights stay.
class OracleExpert {
 public:
  OracleExpert(const MoeProblem& problem, const StackedExpertWeights& weights,
               std::int64_t local_expert, const OracleOptions& options);
  std::vector<double> row(std::span<const double> x, double scale_input) const;
  // The first GEMM's sums with biases [2 I] (or [I]: not gated); what the activation leaves of them
  // [I]; that as the second GEMM's operand, rounded and quantised as the scheme says; and the second
  // GEMM of operand values.
  std::vector<double> first(std::span<const double> x, double scale_input) const;
  std::vector<double> activated(std::span<const double> sums) const;
  std::vector<double> second_operand(std::vector<double> row) const;
  std::vector<double> second(std::span<const double> operand) const;

 private:
  const MoeProblem* problem_;
  const StackedExpertWeights* weights_;
  std::int64_t expert_;
  OracleOptions options_;
  std::vector<double> w13_, w2_;
};

// Standard format: x [M, H], ids [M, k] I32, topk_weights [M, k] F32, expert_map [E] or empty.
// Returns [M, H]; slots with id -1 or a remote expert contribute nothing.
std::vector<double> oracle_moe(const MoeProblem& problem, const StackedExpertWeights& weights,
                               ConstTensorView x, ConstTensorView ids, ConstTensorView topk_weights,
                               std::span<const std::int32_t> expert_map,
                               const OracleOptions& options = {});

// Batched format: x [E_l, T, H] with counts [E_l]. Returns [E_l, T, H], zero past the counts.
std::vector<double> oracle_batched(const MoeProblem& problem, const StackedExpertWeights& weights,
                                   ConstTensorView x, std::span<const std::int32_t> counts,
                                   const OracleOptions& options = {});

}  // namespace moesaic::test
