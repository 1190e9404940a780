// How one chunk of rows is laid out in the workspace of the CPU backends.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "cpu/kernels.h"
#include "experts/problem_checks.h"
#include "experts/row_error.h"
#include "experts/static_scales.h"
#include "moesaic/experts.h"

namespace moesaic::experts {

// What one of the two GEMMs wants of its rows.
struct CpuGemm {
  std::int64_t k = 0;               // reduction length, padded
  std::int64_t fold = cpu::kGroup;  // steps of a group, see CpuWeightFormat
  int folds_per_row_scale = 1;
  bool row_sums = false;      // see CpuPlan
  bool super_scales = false;  // of the weights, expanded for super_scale_steps of a panel at a time
};

// Sizes that follow from the problem and the tier alone.
struct CpuPlan {
  ComputeScheme kind = ComputeScheme::kF32;
  bool standard = true;
  cpu::RowQuantRule row_rule = cpu::RowQuantRule::kNone;
  bool power_of_two_scales = false;  // kFp8Group: activation scales are E8M0
  // Numbers kept beside each operand row: scales, one per row_step columns (0: one per row), and
  // behind them, for weights with offsets (CpuGemm::row_sums), sums of the row, one per group of
  // `fold` steps, times the row's scales. Static scales are not kept.
  bool row_scales = false;
  // Group scales that are exact in the operand are multiplied into it instead.
  bool scaled_operands = false;
  std::int64_t row_step = 0;
  // The intermediate must be complete before it becomes an operand: one scale for the whole row, or
  // columns in another order.
  bool whole_rows = false;
  // Rows are kept a second time, as the integer kernel for many rows of an expert reads them.
  bool e2m1_groups = false;
  bool permuted = false;  // act-order: the columns of every expert have an order of their own
  // Rows of GEMM1 belong to a slot, not to a token: permuted, or each times its slot's weight.
  bool own_rows = false;
  // They may belong to slots, so that those of an expert are one behind the other.
  bool spaced_rows = false;
  // Each expert has scales of its own for the rows. Where they differ in a call, its rows belong to
  // slots too: there is room for that.
  bool static_rows = false;
  bool pads_rows = false;  // see row_pitch
  std::int64_t super_scale_steps = 0;
  cpu::OperandKind operand = cpu::OperandKind::kF32;
  DType round_dtype = DType::kF32;  // of hidden states and intermediate
  std::int64_t top_k = 1;
  std::int64_t num_local_experts = 0;
  std::int64_t hidden = 0, intermediate = 0;  // true widths
  CpuGemm gemm1, gemm2;
  std::int64_t n2 = 0;            // hidden rounded up to whole panels
  std::int64_t columns1 = 0;      // of the first matrix: gate and up, or one
  int num_threads = 1;            // at most: see team()
  std::int64_t expert_bytes = 0;  // packed codes of one expert

  // Threads of a call that has that many rows of that many experts: cpu/team.h.
  int team(std::int64_t rows, std::int64_t experts) const;
  // Threads of a call with that many tokens (standard format), whatever the routing.
  int team_of_tokens(std::int64_t tokens) const;
  // Of so many elements of an operand row; kI8: a multiple of fold.
  std::int64_t operand_bytes(const CpuGemm& gemm, std::int64_t columns) const {
    if (operand == cpu::OperandKind::kI8) return cpu::dot_row_bytes(columns, gemm.fold);
    return columns * (operand == cpu::OperandKind::kBF16 ? 2 : 4);
  }
  // From one row of a matrix of operands to the next.
  std::int64_t row_pitch(const CpuGemm& gemm) const {
    const std::int64_t bytes = operand_bytes(gemm, gemm.k);
    return pads_rows && bytes % 1024 == 0 ? bytes + 64 : bytes;
  }
  std::int64_t e2m1_groups1() const { return gemm1.k / cpu::kE2M1GroupSteps; }
  std::int64_t e2m1_groups2() const { return gemm2.k / cpu::kE2M1GroupSteps; }
  // Of k columns: scales, sums, both.
  std::int64_t scales(std::int64_t k) const {
    if (!row_scales) return 0;
    return row_step == 0 ? 1 : ceil_div(k, row_step);
  }
  std::int64_t sums(const CpuGemm& gemm, std::int64_t columns) const {
    return gemm.row_sums ? columns / gemm.fold : 0;
  }
  bool row_numbers() const { return row_scales || gemm1.row_sums || gemm2.row_sums; }
  // Beside each row of a GEMM.
  std::int64_t numbers(const CpuGemm& gemm) const { return scales(gemm.k) + sums(gemm, gemm.k); }
  // CpuKernels::chunk_rows.
  std::int64_t max_chunk_rows = 8192;
  // Tokens (standard) or rows (batched) handled at a time. 8192 rows of experts' output keep the
  // workspace near hidden * 32 KiB while every expert of a large layer still sees tens of rows.
  std::int64_t chunk_tokens(std::int64_t tokens) const;
  std::int64_t chunk_rows(std::int64_t tokens) const {
    return chunk_tokens(tokens) * (standard ? top_k : 1);
  }
};

// What rounding did to the rows of one chunk, when a call asks (ExpertsArgs::numerics).
struct CpuRowErrors {
  std::vector<RowErrorMeter> meters;  // one per thread
  // Likewise, of weights on the input: the row times its weight before both are rounded.
  std::vector<std::vector<float>> exact;
  std::vector<RowError> input;  // [rows of GEMM1's operands]
  std::vector<RowError> inner;  // [chunk_rows][blocks], parts of a row by block of columns
  std::int64_t blocks = 1;
};

// Pointers into the arena for one chunk; null while measuring.
struct CpuWorkspace {
  // Of one call, not in the arena:
  CpuRowErrors* errors = nullptr;  // null: not measured
  StaticScales a1_static, a2_static;
  bool own_rows = false;     // see CpuPlan
  bool copied_rows = false;  // those of a token's slots are the same
  bool past_caches = false;  // `out` is larger than what caches keep until it is read
  // [chunk_tokens]; CpuPlan::own_rows, spaced_rows, static_rows: [chunk_rows]. spaced_rows: a1 lies in out.
  std::byte* a1 = nullptr;              // [..][gemm1.k] operands of GEMM1
  float* a1_numbers = nullptr;          // [..][numbers(gemm1)]
  cpu::E2M1Group* a1_groups = nullptr;  // [..][gemm1.k / 16], e2m1_groups
  std::byte* a2 = nullptr;              // [chunk_rows][gemm2.k] operands of GEMM2
  float* a2_numbers = nullptr;          // [chunk_rows][numbers(gemm2)]
  cpu::E2M1Group* a2_groups = nullptr;  // [chunk_rows][gemm2.k / 16]
  float* a2_raw = nullptr;  // [chunk_rows][gemm2.k] whole_rows: rounded, not yet operands
  float* out = nullptr;     // [chunk_rows][n2]
  std::int32_t* sorted_slots = nullptr;  // [chunk_rows]
  std::int32_t* position = nullptr;      // [chunk_rows]: slot -> row, or -1
  std::int64_t* first_row = nullptr;     // [E_l + 1]
  std::int32_t* active = nullptr;        // [E_l] experts with rows
  float* scratch = nullptr;              // [threads][2][longest row]
  std::int64_t scratch_stride = 0;
  float* scales = nullptr;  // [threads][scales_stride] super_scales: those that the thread is at
  std::int64_t scales_stride = 0;

  // Carves (or measures) in a fixed order; monotone in tokens.
  static CpuWorkspace carve(const CpuPlan& plan, std::int64_t tokens, Arena& arena);
};

}  // namespace moesaic::experts
