// The CPU's gate kernel: fp32 dot products of rows of x with rows of W, for a rectangle of the
// [M, E] logits. SIMD through Highway's run-time dispatch. No threads, no roundings, no bias here.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic {

// Rows of `x` and `weight` hold H contiguous elements of F32, BF16 or F16, not necessarily aligned.
struct GateOperands {
  const std::byte* x = nullptr;  // [M, H]
  DType x_dtype = DType::kF32;
  std::int64_t x_row_bytes = 0;       // distance of rows of x
  const std::byte* weight = nullptr;  // [E, H] contiguous
  DType weight_dtype = DType::kF32;
  std::int64_t hidden_size = 0;
};

// logits[(t - t_begin) * logits_stride + (e - e_begin)] = x[t] . weight[e] for the rectangle
// [t_begin, t_end) x [e_begin, e_end).
// Each dot product is the sum over lanes of lane-wise fp32 accumulations in ascending order, with
// the last partial vector padded by zeros: its bits depend on the two rows and on the SIMD width
// only, not on the rectangle. Error: <= H * 2^-24 * sum|x*w|.
void cpu_gate_logits(const GateOperands& operands, std::int64_t t_begin, std::int64_t t_end,
                     std::int64_t e_begin, std::int64_t e_end, float* logits,
                     std::int64_t logits_stride);

// What one thread needs for [rows, experts] logits: 13 multiply-adds a nanosecond (2^18 in 20 us),
// for the size of its team (cpu/team.h).
constexpr double cpu_gate_us(std::int64_t rows, std::int64_t experts, std::int64_t hidden_size) {
  return static_cast<double>(rows) * static_cast<double>(experts) *
         static_cast<double>(hidden_size) / 13e3;
}

// Name of the SIMD target that cpu_gate_logits would take now: "AVX3", "AVX2", "SSE4", ...
const char* cpu_gate_target();

}  // namespace moesaic
