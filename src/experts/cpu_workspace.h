// How one chunk of rows is laid out in the workspace of the CPU backends.
#pragma once

#include <cstdint>

#include "core/arena.h"
#include "cpu/kernels.h"
#include "experts/problem_checks.h"
#include "moesaic/experts.h"

namespace moesaic {

// Sizes that follow from the problem and the tier alone.
struct CpuPlan {
  ComputeScheme scheme = ComputeScheme::kF32;
  bool standard = true;
  bool quantize = false;             // activations to e4m3 per 128 columns
  bool power_of_two_scales = false;  // activation scales are E8M0
  cpu::OperandKind operand = cpu::OperandKind::kF32;
  DType round_dtype = DType::kF32;  // of hidden states and intermediate
  std::int64_t top_k = 1;
  std::int64_t num_local_experts = 0;
  std::int64_t hidden = 0, intermediate = 0;  // true widths
  std::int64_t k1 = 0, k2 = 0;                // padded reduction lengths of the two GEMMs
  std::int64_t n2 = 0;                        // hidden rounded up to whole panels
  int num_threads = 1;

  std::int64_t operand_bytes() const { return operand == cpu::OperandKind::kBF16 ? 2 : 4; }
  std::int64_t groups1() const { return ceil_div(k1, cpu::kGroup); }
  std::int64_t groups2() const { return ceil_div(k2, cpu::kGroup); }
  // Tokens (standard) or rows (batched) handled at a time. 8192 rows of experts' output keep the
  // workspace near hidden * 32 KiB while every expert of a large layer still sees tens of rows.
  std::int64_t chunk_tokens(std::int64_t tokens) const;
  std::int64_t chunk_rows(std::int64_t tokens) const {
    return chunk_tokens(tokens) * (standard ? top_k : 1);
  }
};

// Pointers into the arena for one chunk; null while measuring.
struct CpuWorkspace {
  std::byte* a1 = nullptr;               // [chunk_tokens][k1] operands of GEMM1
  float* a1_scales = nullptr;            // [chunk_tokens][groups1]
  std::byte* a2 = nullptr;               // [chunk_rows][k2] operands of GEMM2
  float* a2_scales = nullptr;            // [chunk_rows][groups2]
  float* out = nullptr;                  // [chunk_rows][n2]
  std::int32_t* sorted_slots = nullptr;  // [chunk_rows]
  std::int32_t* position = nullptr;      // [chunk_rows]: slot -> row, or -1
  std::int64_t* first_row = nullptr;     // [E_l + 1]
  std::int32_t* active = nullptr;        // [E_l] experts with rows
  float* scratch = nullptr;              // [threads][max(k1, k2, n2)]
  std::int64_t scratch_stride = 0;

  // Carves (or measures) in a fixed order; monotone in tokens.
  static CpuWorkspace carve(const CpuPlan& plan, std::int64_t tokens, Arena& arena);
};

}  // namespace moesaic
