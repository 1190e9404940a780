// What the general experts take, and the sizes that follow from a problem: host code without CUDA,
// part of every build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/arena.h"
#include "experts/cuda_general/row_values.h"
#include "experts/sm90/experts.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "permute/sm90/align.h"

namespace moesaic::cuda {

// kUnsupported: the batched format with quantised activations, but for fp8-block; more than 1024
// local experts. Any scheme, H, I, activation, bias; the router's weight on the input with any k.
Status general_experts_take(const MoeProblem& problem);
// Bytes for M tokens, monotone in tokens, without a device.
Result<std::int64_t> general_workspace_size(const MoeProblem& problem, std::int64_t tokens);
// What GeneralExperts::enqueue says of a call's sizes, dtypes and addresses.
Status check_general_args(const MoeProblem& problem, const CudaExpertsArgs& args);

struct GeneralPlan {
  explicit GeneralPlan(const MoeProblem& problem);

  DType operand;                    // of rows and intermediate, before they are quantised
  DType weight;                     // as they lie on the device
  bool decodes;                     // weights in another format become F32 when they are loaded
  bool quantizes;                   // fp8-block: rows are e4m3 codes with a scale per 128 columns
  std::optional<ValueRule> values;  // other schemes that quantise: rows are the codes' values
  bool reorders;                    // their columns follow those of the expert's weights
  bool rows_by_pair;  // quantised rows depend on the router's weight, or on the expert
  std::int64_t w13_rows, hidden, inner;

  // Elements of a weight row in memory: whole 16 bytes.
  std::int64_t stride(std::int64_t columns) const;
  // Token rows of a group: few where experts have few.
  static std::int32_t rows_per_record(std::int64_t pairs, std::int64_t experts);
};

// Pointers into the workspace; null while measuring.
struct GeneralWorkspace {
  // Control: next item, groups, batched format: rows of the list.
  std::uint32_t *control = nullptr, *group_done = nullptr, *band_done = nullptr;
  GroupRecord* groups = nullptr;
  std::int32_t *pair_of_row = nullptr, *row_of_pair = nullptr;
  float* weight_of_row = nullptr;
  std::uint8_t *codes = nullptr, *inner_codes = nullptr;  // quantised rows ...
  float *scale = nullptr, *inner_scale = nullptr;         // [ceil(columns / 128)][rows]
  float *values = nullptr, *inner_values = nullptr;       // ... as values
  float* call_scales = nullptr;                           // [2, E_l], where scales are stored
  std::byte* inner = nullptr;                             // [M k, I] of the operand's dtype
  float* y = nullptr;                                     // [M k, H], weighted
  std::int64_t max_groups = 0, rows = 0, pairs = 0;
  std::uint32_t* num_rows() const { return control + 2; }

  // problem_of_rows and rows_of_tokens.
  static GeneralWorkspace carve(const MoeProblem& problem, const GeneralPlan& plan,
                                std::int64_t tokens, Arena& arena);
};

}  // namespace moesaic::cuda
