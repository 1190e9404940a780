// Sizes that follow from a problem alone: formats, repacked shapes, workspace. Host code without
// CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "experts/sm90/formats.h"
#include "experts/sm90/grouped_gemm.h"
#include "experts/sm90/repack.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

struct ExpertsPlan {
  const FormatRow* format = nullptr;
  EpilogueKind epilogue = EpilogueKind::kSwiglu;
  WeightShape w13, w2;
  OperandQuant weight;      // as it is handed over
  MatrixForms forms;        // as images have it
  CodeImage codes, codes2;  // of w13 and w2, where the format has several kinds
  bool power_of_two_scales = false;
  bool weight_on_input = false;
  bool static_scales = false;  // of operand rows, with the weights
  // Operand rows are made in the workspace (quantised, or multiplied by the router weight).
  bool makes_rows() const { return !half_rows() && (quantizes() || weight_on_input); }
  // Operand rows are F16: made where hidden states are something else, or have weights.
  bool half_rows() const { return format->rows == RowForm::kF16; }
  // GEMM2's rows are F32, and so are slots; hidden states and results are of any float dtype.
  bool wide() const { return row_has_wide_result(format->rows); }
  // A row of hidden states is made for every pair, in the order of its expert's columns.
  bool gathers_rows() const { return weight.act_order; }
  // Operand rows are codes with scales, or the values of codes.
  bool quantizes() const { return row_is_quantised(format->rows); }
  // GEMM1 leaves bf16 rows, which are quantised when a row is complete.
  bool quantizes_late() const { return row_is_whole(format->rows) && !static_scales; }
  // Takes the image of weights whose scales are all bf16 numbers, or not.
  void set_image(bool exact_scales);
  // Sizes of the problem and its images.
  void fill_sizes(const MoeProblem& problem, GroupedParams& to) const;
};

// The batched format as the kernels see it: every row of the slabs is a token with one expert.
constexpr bool has_slabs(const MoeProblem& problem) {
  return problem.format == ActivationFormat::kBatched;
}
// kLimitExceeded.
Result<std::int64_t> rows_of_tokens(const MoeProblem& problem, std::int64_t tokens);
inline MoeProblem problem_of_rows(MoeProblem problem) {
  if (!has_slabs(problem)) return problem;
  problem.top_k = 1;
  problem.apply_router_weight_on_input = false;  // prepare has done it
  return problem;
}

// kUnsupported: more rows of work than 32 bits count.
Status check_row_count(const MoeProblem& problem);

struct CudaExpertsArgs;
// What only one of the two formats has: kUnsupported, and bad addresses of it.
Status check_format_of_call(const MoeProblem& problem, const CudaExpertsArgs& args);
// What CudaExperts::enqueue says of a call's sizes, dtypes and addresses.
Status check_args(const MoeProblem& problem, const ExpertsPlan& plan, const CudaExpertsArgs& args);

// kUnsupported: a scheme that no format computes. The rest of the problem has passed
// CudaExperts::can_implement.
Result<ExpertsPlan> make_experts_plan(const MoeProblem& problem);

// Pointers into the workspace; null while measuring.
struct ExpertsWorkspace {
  std::uint32_t* control = nullptr;  // next item, number of groups, rows of a list with a capacity
  std::uint32_t* group_done = nullptr;
  std::uint32_t* band_done = nullptr;
  std::uint32_t* inner_amax = nullptr;  // behind band_done, where rows are quantised late
  std::int32_t counter_words = 0;       // from control to the end of these
  GroupRecord* groups = nullptr;
  std::int32_t* pair_of_row = nullptr;
  std::int32_t* row_of_pair = nullptr;
  float* weight_of_row = nullptr;
  std::byte* rows = nullptr;  // operand rows of GEMM1, when the plan makes them; static scales may
                              // differ: then one per pair
  float* row_scale = nullptr;
  std::byte* inner = nullptr;       // operand rows of GEMM2
  std::byte* inner_bf16 = nullptr;  // the same before they are quantised late
  float* inner_scale = nullptr;
  std::byte* y2 = nullptr;       // weighted rows of the list
  float* call_scales = nullptr;  // static scales that a call brings, of both GEMMs' rows, [2, E_l]
  std::int64_t row_scale_stride = 0, inner_scale_stride = 0, max_groups = 0, listed_rows = 0;

  // problem_of_rows and rows_of_tokens. capacity: CudaExpertsArgs::pair_capacity.
  static ExpertsWorkspace carve(const MoeProblem& problem, const ExpertsPlan& plan,
                                std::int64_t tokens, std::int64_t capacity, Arena& arena);
};

}  // namespace moesaic::cuda
