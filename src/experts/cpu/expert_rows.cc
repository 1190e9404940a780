// Rows of the CPU backends: hidden states and intermediate, rounded or quantised, as operands.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/fault.h"
#include "experts/cpu/experts_impl.h"
#include "numerics/float_codec.h"

namespace moesaic::experts {

using cpu::OperandKind;

void CpuExperts::store_operand(const CpuGemm& gemm, const float* row, std::int64_t n,
                               std::byte* dst) const {
  if (plan_.operand == OperandKind::kI8) {
    kernels_.store_i8(row, n, static_cast<int>(gemm.fold), dst);
  } else if (plan_.operand == OperandKind::kBF16) {
    kernels_.store_bf16(row, n, reinterpret_cast<std::uint16_t*>(dst));
  } else if (reinterpret_cast<const std::byte*>(row) != dst) {
    std::memcpy(dst, row, static_cast<std::size_t>(n) * sizeof(float));
  }
}

// Measures x as finish_row is about to round it.
void CpuExperts::measure(const CpuWorkspace& w, const float* x, std::int64_t n, float input_scale,
                         RowError& error, const float* exact) const {
  RowErrorMeter& meter = w.errors->meters[static_cast<std::size_t>(omp_get_thread_num())];
  error = meter.measure(x, n, input_scale, exact);
}

RowNumbers CpuExperts::numbers_from(const CpuGemm& gemm, float* numbers,
                                    std::int64_t column) const {
  RowNumbers row;
  if (plan_.row_scales) row.scales = numbers + (plan_.row_step > 0 ? column / plan_.row_step : 0);
  if (gemm.row_sums) row.sums = numbers + plan_.scales(gemm.k) + column / gemm.fold;
  return row;
}

// A row (or a block of 128 columns of it), rounded to round_dtype, to its operand and the numbers
// beside it.
void CpuExperts::finish_row(const CpuGemm& gemm, float* x, std::int64_t n, float input_scale,
                            const RowNumbers& numbers, std::byte* operand,
                            cpu::E2M1Group* groups) const {
  if (plan_.row_rule == cpu::RowQuantRule::kFp8Group && plan_.row_step == cpu::kGroup) {
    kernels_.quantize_row_e4m3(x, n, plan_.round_dtype, plan_.power_of_two_scales, numbers.scales,
                               operand);
    return;
  }
  kernels_.round_row(x, n, plan_.round_dtype);
  if (groups != nullptr) {
    float scales[cpu::kGroup / cpu::kE2M1GroupSteps];
    for (std::int64_t k = 0; k < n; k += cpu::kGroup) {
      const std::int64_t count = std::min<std::int64_t>(cpu::kGroup, n - k);
      kernels_.quantize_row(plan_.row_rule, plan_.row_step, input_scale, x + k, count, scales);
      kernels_.store_e2m1(x + k, count, scales, groups + k / cpu::kE2M1GroupSteps);
    }
  } else if (plan_.row_rule == cpu::RowQuantRule::kInt8) {
    const std::int64_t step = plan_.row_step > 0 ? plan_.row_step : n;
    for (std::int64_t k = 0, g = 0; k < n; k += step, ++g)
      kernels_.quantize_row(plan_.row_rule, step, 1.0F, x + k, std::min(step, n - k),
                            numbers.scales + g);
  } else if (plan_.row_rule != cpu::RowQuantRule::kNone) {
    kernels_.quantize_row(plan_.row_rule, plan_.row_step, input_scale, x, n, numbers.scales);
  }
  if (gemm.row_sums) {
    kernels_.group_sums(x, n, gemm.fold, numbers.sums);
    const bool scaled = plan_.row_scales && !MOESAIC_FAULT(cpu_row_sums_without_scale);
    for (std::int64_t g = 0; scaled && g < plan_.sums(gemm, n); ++g)
      numbers.sums[g] *= numbers.scales[g / gemm.folds_per_row_scale];
  }
  store_operand(gemm, x, n, operand);
}

// An intermediate row that GEMM1 left complete: into the order of w2's columns, then as above.
void CpuExperts::finish_whole_row(const CpuWorkspace& w, std::int64_t r) const {
  const std::int64_t e = expert_of_row(w, r);
  float* x = w.a2_raw + r * plan_.gemm2.k;
  const std::int32_t* perm = weights_.w2.perm(e);
  if (perm != nullptr && !MOESAIC_FAULT(cpu_intermediate_not_permuted)) {
    float* gathered = scratch(w);
    for (std::int64_t k = 0; k < plan_.intermediate; ++k) gathered[k] = x[perm[k]];
    std::memcpy(x, gathered, static_cast<std::size_t>(plan_.intermediate) * sizeof(float));
  }
  std::fill(x + plan_.intermediate, x + plan_.gemm2.k, 0.0F);
  if (w.errors != nullptr && plan_.row_rule != cpu::RowQuantRule::kNone) {
    measure(w, x, plan_.intermediate, w.a2_static.of(e),
            w.errors->inner[static_cast<std::size_t>(r * w.errors->blocks)]);
  }
  const CpuGemm& gemm = plan_.gemm2;
  finish_row(gemm, x, gemm.k, w.a2_static.of(e),
             numbers_from(gemm, w.a2_numbers + r * plan_.numbers(gemm), 0),
             w.a2 + r * plan_.row_pitch(gemm), nullptr);
}

// x rounded to the operand dtype, times the rounded weight (weight on input), in the order of the
// columns of expert e's w13, quantised, stored as an operand (and in the integer kernel's form).
void CpuExperts::prepare_input(const CpuWorkspace& w, std::int64_t row, std::int64_t e,
                               const std::byte* src, DType dtype, float factor,
                               bool e2m1_groups) const {
  float* x = scratch(w);
  kernels_.load_row(src, dtype, plan_.hidden, plan_.gemm1.k, x);
  const std::int32_t* perm = plan_.permuted ? weights_.w13.perm(e) : nullptr;
  float* exact = nullptr;
  if (problem_.apply_router_weight_on_input && plan_.standard) {
    if (w.errors != nullptr) {
      exact = w.errors->exact[static_cast<std::size_t>(omp_get_thread_num())].data();
      for (std::int64_t k = 0; k < plan_.hidden; ++k) {
        exact[k] = x[perm != nullptr ? perm[k] : k] * factor;
      }
    }
    kernels_.round_row(x, plan_.hidden, plan_.round_dtype);
    kernels_.round_row(&factor, 1, plan_.round_dtype);
    kernels_.scale_row(x, plan_.hidden, factor);
  }
  if (perm != nullptr) {
    float* gathered = x + w.scratch_stride;
    for (std::int64_t k = 0; k < plan_.hidden; ++k) gathered[k] = x[perm[k]];
    std::fill(gathered + plan_.hidden, gathered + plan_.gemm1.k, 0.0F);
    x = gathered;
  }
  if (w.errors != nullptr) {
    measure(w, x, plan_.hidden, w.a1_static.of(e), w.errors->input[static_cast<std::size_t>(row)],
            exact);
  }
  const CpuGemm& gemm = plan_.gemm1;
  finish_row(gemm, x, gemm.k, w.a1_static.of(e),
             numbers_from(gemm, w.a1_numbers + row * plan_.numbers(gemm), 0),
             w.a1 + row * plan_.row_pitch(gemm),
             e2m1_groups ? w.a1_groups + row * plan_.e2m1_groups1() : nullptr);
}

// A row that was quantised elsewhere: its codes become the operand, its scales are kept.
void CpuExperts::load_quantized(const CpuWorkspace& w, std::int64_t row, const std::byte* codes,
                                const float* scales) const {
  static const auto kValues = [] {
    std::array<float, 256> values{};
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = f32_from_e4m3(static_cast<std::uint8_t>(i));
    }
    return values;
  }();
  float* x = scratch(w);
  for (std::int64_t i = 0; i < plan_.hidden; ++i) {
    x[i] = kValues[std::to_integer<std::size_t>(codes[i])];
  }
  std::fill(x + plan_.hidden, x + plan_.gemm1.k, 0.0F);
  if (!MOESAIC_FAULT(cpu_quantized_rows_keep_old_scales)) {
    std::memcpy(w.a1_numbers + row * plan_.numbers(plan_.gemm1), scales,
                static_cast<std::size_t>(plan_.scales(plan_.gemm1.k)) * sizeof(float));
  }
  store_operand(plan_.gemm1, x, plan_.gemm1.k, w.a1 + row * plan_.row_pitch(plan_.gemm1));
}

// A prepared row, and all that is kept beside it, is another's too.
void CpuExperts::copy_input(const CpuWorkspace& w, std::int64_t from, std::int64_t to) const {
  const auto copy = [&](auto* rows, std::int64_t size) {
    if (rows == nullptr) return;
    std::memcpy(rows + to * size, rows + from * size,
                static_cast<std::size_t>(size) * sizeof(*rows));
  };
  copy(w.a1, plan_.row_pitch(plan_.gemm1));
  if (!MOESAIC_FAULT(cpu_copied_rows_keep_old_numbers))
    copy(w.a1_numbers, plan_.numbers(plan_.gemm1));
  copy(w.a1_groups, plan_.e2m1_groups1());
  if (w.errors != nullptr) {
    w.errors->input[static_cast<std::size_t>(to)] = w.errors->input[static_cast<std::size_t>(from)];
  }
}

}  // namespace moesaic::experts
