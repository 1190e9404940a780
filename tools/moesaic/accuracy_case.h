// The error of number formats on one layer: its weights, its activations and its output, scheme by
// scheme. What `moesaic accuracy` prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/experts.h"
#include "moesaic/numerics.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::tool {

// A layer of unquantised experts with rows and their routing.
struct AccuracyCase {
  std::string name;
  std::int64_t num_experts = 0, top_k = 0, hidden_size = 0, intermediate_size = 0;
  std::vector<Tensor> w13, w2;  // [2I, H] and [H, I] F32, one per expert; gated SiLU
  Tensor hidden_states;         // [M, H] BF16
  Tensor topk_ids;              // [M, k] I32
  Tensor topk_weights;          // [M, k] F32
  double output_norm = 0;       // of the whole layer's output; 0: of the routed experts'
};

// X ~ N(0, 1) in bf16, W ~ N(0, 1/K), one expert per row.
Result<AccuracyCase> gaussian_case(std::uint64_t seed);
// The first block of <model>/golden.safetensors that is an MoE layer: its stored weights as fp32,
// its recorded rows (at most `max_tokens`), routed by the layer itself.
Result<AccuracyCase> model_case(const std::string& model, std::int64_t max_tokens);

struct AccuracyRow {
  std::string scheme, backend;
  // Relative L2. weights: decoded against original. activations: the rows as GEMM1 reads them.
  // output: against the same layer in fp32 with the original weights; arithmetic: against fp32 with
  // the *stored* weights. Both of the routed experts, relative to the layer's whole output.
  double weights = 0, activations = 0, output = 0, arithmetic = 0;
  // What they may be: 1.15 times what the formats do on normal data; the scheme's bound; and both
  // together, the weights' error 2.31-fold (sqrt(3) through three matrices, and a third).
  double weights_bound = 0, activations_bound = 0, output_bound = 0, arithmetic_bound = 0;
};
// Quantises the case's weights for this scheme and runs it on the CPU backend that it would get.
Result<AccuracyRow> measure_accuracy(const AccuracyCase& data, const Scheme& scheme,
                                     int num_threads);

// The case's weights, quantised for `scheme` with static scales calibrated on its own rows, applied
// to `rows` [M, H] BF16 (M as the case) on the CPU backend that the scheme would get.
struct SchemeRun {
  // Relative L2 against fp32 with the same stored weights, relative to the parts of the output
  // where they cancel.
  double arithmetic = 0;
  std::vector<RowNumerics> numerics;  // [M]
};
Result<SchemeRun> run_scheme(const AccuracyCase& data, const Scheme& scheme, const Tensor& rows,
                             int num_threads);

}  // namespace moesaic::tool
