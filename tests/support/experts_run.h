// Runs an experts backend the way tests want it: a poisoned, exactly sized workspace and a poisoned
// output.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moesaic/experts.h"
#include "support/moe_oracle.h"

namespace moesaic::test {

// A scheme by its name, or one that only checkpoints imply:
//   fp8-static     fp8-tensor with static activation scales; likewise int4-fp8-static, mxfp4-static
//   gptq           U4 per 32, F16 scales, zero points, act-order
//   awq            U4 per 64, F16 scales, zero points
//   int4-g32       I4 per 32
//   int4-channel   I4, one scale per row
//   q4k            U4 per 32 with minima
//   q6k            I8 per 16
//   u8-zero        U8 per row with zero points
//   *-int8         integers of another name, activations in int8 per group of theirs
//   nvfp4-rows     nvfp4 with a global scale per row of the weights
//   mxfp8-bf16     mxfp8 weights with bf16 activations
//   fp4-bf16       table of 16 values, absmax per 64
Scheme scheme_called(std::string_view name);

// A small problem: E 6, k 2, H 96, I 64 (e4m3 and groups of 64 or more: H 256, I 128), silu, every
// expert local.
MoeProblem small_problem(std::string_view quant);

struct StandardCase {
  MoeProblem problem;
  OwnedExpertWeights weights;
  OwnedRouting routing;
  Tensor hidden_states;                  // [M, H]
  std::vector<std::int32_t> expert_map;  // empty: identity
  // The oracle on the same inputs.
  std::vector<double> oracle(bool round_like_scheme) const;
};
// Weights, hidden states of `dtype` with sd 1, and routing from one seed. problem.max_tokens is
// set.
StandardCase make_case(std::uint64_t seed, const MoeProblem& problem, std::int64_t tokens,
                       DType dtype, double invalid_slots = 0.0);

// Backend `name` of the catalogue bound to the case's weights; aborts the test binary with the
// reason when it refuses.
std::unique_ptr<Experts> make_backend(std::string_view name, const StandardCase& c);

// run() with NaN in output and workspace; the result has been checked to be ok.
Tensor run_standard(const Experts& experts, const StandardCase& c,
                    DType output_dtype = DType::kF32);

// Uninitialised memory with 64-byte alignment that ends `bytes` after its start.
Tensor poisoned_bytes(std::int64_t bytes);

}  // namespace moesaic::test
