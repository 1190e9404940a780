// The two grouped GEMMs of the CPU backends, panel by panel.
#include <algorithm>
#include <cstring>

#include "activation/reference/activation.h"
#include "core/checked.h"
#include "core/fault.h"
#include "experts/cpu/experts_impl.h"

namespace moesaic::experts {

using cpu::kMaxRows;
using cpu::kPanelColumns;

// The grouped GEMM of a panel whose scales are in super-blocks, some of them at a time.
void CpuExperts::multiply_super_blocks(const CpuWorkspace& w, const Matrix& matrix,
                                       cpu::PanelArgs args) const {
  const bool few = args.num_rows <= cpu::kSuperGemmRows;
  if (matrix.super_product != nullptr && few) return matrix.super_product(args);
  const CpuGemm& gemm = *matrix.gemm;
  const CpuProjection& projection = *matrix.weights;
  const void* rows[kMaxRows];
  const float *scales[kMaxRows], *sums[kMaxRows];
  const auto copy = [&](auto& from, auto* to) {
    if (from == nullptr) return;
    std::copy_n(from, args.num_rows, to);
    from = to;
  };
  copy(args.rows, rows);
  copy(args.row_scales, scales);
  copy(args.row_sums, sums);
  float* buffer = w.scales + omp_get_thread_num() * w.scales_stride;
  const std::byte* compact = args.group_scales;
  const std::int64_t k = args.padded_k, steps = plan_.super_scale_steps;
  const std::int64_t groups = steps / gemm.fold;
  for (std::int64_t k0 = 0; k0 < k; k0 += steps) {
    args.padded_k = std::min(steps, k - k0);
    projection.expand_scales(kernels_, compact, k0, buffer, args);
    matrix.product(args);
    args.accumulate = !MOESAIC_FAULT(cpu_super_blocks_overwrite);
    args.panel += projection.shape().bytes_of(steps);
    for (int r = 0; r < args.num_rows; ++r) {
      rows[r] = static_cast<const std::byte*>(rows[r]) + plan_.operand_bytes(gemm, steps);
      if (args.row_scales != nullptr) scales[r] += groups / args.folds_per_row_scale;
      if (args.row_sums != nullptr) sums[r] += groups;
    }
  }
}

// result = rows times panel p of expert e, all scales included.
void CpuExperts::multiply(const CpuWorkspace& w, const Matrix& matrix, std::int64_t e,
                          std::int64_t p, cpu::PanelArgs& args, const float* const* numbers,
                          float static_scale) const {
  const CpuGemm& gemm = *matrix.gemm;
  const CpuProjection& projection = *matrix.weights;
  const bool whole_row_scales = plan_.row_scales && plan_.row_step == 0;
  cpu::PanelArgs all = projection.panel(e, p);
  all.rows = args.rows;
  all.num_rows = args.num_rows;
  all.result = args.result;
  all.folds_per_row_scale = gemm.folds_per_row_scale;
  const float* sums[kMaxRows];
  if (gemm.row_sums) {
    const std::int64_t before = plan_.scales(projection.shape().padded_k());
    for (int r = 0; r < args.num_rows; ++r) sums[r] = numbers[r] + before;
    all.row_sums = sums;
  }
  if (plan_.row_scales && !whole_row_scales) all.row_scales = numbers;
  if (gemm.super_scales) {
    multiply_super_blocks(w, matrix, all);
  } else if (reads_e2m1_groups(args.num_rows)) {
    kernels_.grouped_gemm_e2m1(all);
  } else {
    matrix.product(all);
  }
  const float* factors = projection.column_factors(e, p);
  if (factors == nullptr) return;
  const float* fixed[kMaxRows];
  if (plan_.static_rows && !MOESAIC_FAULT(cpu_alpha_without_input_scale)) {
    std::fill_n(fixed, args.num_rows, &static_scale);
    numbers = fixed;
  } else if (!whole_row_scales) {
    numbers = nullptr;
  }
  kernels_.scale_result(args.result, args.num_rows, factors, numbers);
}

// GEMM1 for one block of intermediate columns of one expert: gate and up, bias, activation,
// rounding, and for quantised activations the e4m3 codes of one group of 128. The block's fp32
// values never leave the cache.
void CpuExperts::block1(const CpuWorkspace& w, std::int64_t e, std::int64_t block) const {
  alignas(64) float result[kMaxRows * kPanelColumns];
  alignas(64) float act[kMaxRows * cpu::kGroup];
  const void* rows[kMaxRows];
  const float* numbers[kMaxRows];
  const CpuGemm& gemm2 = plan_.gemm2;
  const std::int64_t width = panel_width();
  const std::int64_t first_panel = block * panels_per_block_;
  const std::int64_t last_panel =
      std::min(first_panel + panels_per_block_, weights_.w13.shape().num_panels());
  const std::int64_t column = first_panel * width;
  // Columns beyond I (zero weights) up to the padded width hold act(0), which need not be 0:
  // cleared, not multiplied.
  const std::int64_t valid = std::min(panels_per_block_ * width, gemm2.k - column);
  const std::int64_t real = std::min(valid, plan_.intermediate - column);
  std::int64_t end = w.first_row[e + 1];
  const std::int64_t most = rows_of_call(end - w.first_row[e]);
  if (MOESAIC_FAULT(cpu_last_row_of_expert_dropped)) --end;
  for (std::int64_t begin = w.first_row[e]; begin < end; begin += most) {
    const int count = static_cast<int>(std::min<std::int64_t>(most, end - begin));
    for (int r = 0; r < count; ++r) {
      const std::int64_t in = input_of(w, begin + r);
      rows[r] = w.a1 + in * plan_.row_pitch(plan_.gemm1);
      if (reads_e2m1_groups(count)) rows[r] = w.a1_groups + in * plan_.e2m1_groups1();
      numbers[r] = w.a1_numbers + in * plan_.numbers(plan_.gemm1);
    }
    cpu::PanelArgs args;
    args.rows = rows;
    args.num_rows = count;
    args.result = result;
    for (std::int64_t p = first_panel; p < last_panel; ++p) {
      multiply(w, matrix13_, e, p, args, numbers, w.a1_static.of(e));
      kernels_.activate({.c = result,
                         .num_rows = count,
                         .bias = weights_.w13.panel_bias(e, p),
                         .activation = problem_.activation,
                         .scalar_activation = &activation::ref_activation,
                         .out = act + (p - first_panel) * width,
                         .out_stride = cpu::kGroup});
    }
    for (int r = 0; r < count; ++r) {
      float* y = act + r * cpu::kGroup;
      for (std::int64_t c = real; c < valid; ++c) y[c] = 0.0F;
      // One scale for the whole row: measured when it is there (finish_whole_row).
      const bool later = plan_.whole_rows && plan_.row_rule != cpu::RowQuantRule::kNone;
      if (w.errors != nullptr && real > 0 && !later) {
        measure(w, y, real, w.a2_static.of(e),
                w.errors->inner[static_cast<std::size_t>((begin + r) * w.errors->blocks + block)]);
      }
      if (plan_.whole_rows) {
        kernels_.round_row(y, valid, plan_.round_dtype);
        std::memcpy(w.a2_raw + (begin + r) * gemm2.k + column, y,
                    static_cast<std::size_t>(valid) * sizeof(float));
        continue;
      }
      const RowNumbers kept =
          numbers_from(gemm2, w.a2_numbers + (begin + r) * plan_.numbers(gemm2), column);
      std::byte* operand =
          w.a2 + (begin + r) * plan_.row_pitch(gemm2) + plan_.operand_bytes(gemm2, column);
      if (MOESAIC_FAULT(cpu_intermediate_not_requantised)) {
        kernels_.round_row(y, valid, plan_.round_dtype);
        store_operand(gemm2, y, valid, operand);
        if (plan_.row_scales) std::fill_n(kept.scales, plan_.scales(valid), 1.0F);
        if (gemm2.row_sums) std::fill_n(kept.sums, plan_.sums(gemm2, valid), 1.0F);
        continue;
      }
      finish_row(gemm2, y, valid, w.a2_static.of(e), kept, operand,
                 reads_e2m1_groups(count) ? w.a2_groups + (begin + r) * plan_.e2m1_groups2() +
                                                column / cpu::kE2M1GroupSteps
                                          : nullptr);
    }
  }
}

// GEMM2 for one panel of one expert: 64 columns of the unweighted output.
void CpuExperts::panel2(const CpuWorkspace& w, std::int64_t e, std::int64_t p) const {
  alignas(64) float result[kMaxRows * kPanelColumns];
  const void* rows[kMaxRows];
  const float* numbers[kMaxRows];
  const float* bias = weights_.w2.panel_bias(e, p);
  const std::int64_t end = w.first_row[e + 1];
  const std::int64_t most = rows_of_call(end - w.first_row[e]);
  for (std::int64_t begin = w.first_row[e]; begin < end; begin += most) {
    const int count = static_cast<int>(std::min<std::int64_t>(most, end - begin));
    for (int r = 0; r < count; ++r) {
      rows[r] = w.a2 + (begin + r) * plan_.row_pitch(plan_.gemm2);
      if (reads_e2m1_groups(count)) rows[r] = w.a2_groups + (begin + r) * plan_.e2m1_groups2();
      numbers[r] = w.a2_numbers + (begin + r) * plan_.numbers(plan_.gemm2);
    }
    cpu::PanelArgs args;
    args.rows = rows;
    args.num_rows = count;
    args.result = result;
    multiply(w, matrix2_, e, p, args, numbers, w.a2_static.of(e));
    for (int r = 0; bias != nullptr && r < count; ++r)
      kernels_.accumulate_row(bias, 1.0F, kPanelColumns, result + r * kPanelColumns);
    kernels_.store_panel(result, count, w.past_caches, w.out + begin * plan_.n2 + p * kPanelColumns,
                         plan_.n2);
  }
}

std::int64_t CpuExperts::active_experts(const CpuWorkspace& w, std::int64_t num_experts) {
  std::int64_t count = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (w.first_row[e + 1] > w.first_row[e]) w.active[count++] = static_cast<std::int32_t>(e);
  }
  return count;
}

// Neighbouring panels are neighbours in memory: a thread keeps a run of them, so that one stream is
// not cut into pieces, as long as every thread still gets a dozen turns to even out the load. At
// most 16 panels: what one thread still works on when the others are done is lost time.
std::int64_t CpuExperts::task_chunk(std::int64_t tasks, std::int64_t panels_per_task) const {
  return std::clamp<std::int64_t>(tasks / (12 * plan_.num_threads), 1, 16 / panels_per_task);
}

// Both GEMMs of a chunk; called by all threads of a team, ends with a barrier. Tasks are panels in
// the order of memory, handed out as threads become free: which thread computes a panel does not
// change its bits.
void CpuExperts::gemms(const CpuWorkspace& w, std::int64_t num_active) const {
  const std::int64_t blocks1 = num_blocks1();
  const std::int64_t panels2 = weights_.w2.shape().num_panels();
  const std::int64_t chunk1 = task_chunk(num_active * blocks1, panels_per_block_);
  const std::int64_t chunk2 = task_chunk(num_active * panels2, 1);
#pragma omp for schedule(dynamic, chunk1)
  for (std::int64_t t = 0; t < num_active * blocks1; ++t)
    block1(w, w.active[t / blocks1], t % blocks1);
  if (plan_.whole_rows) {
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < w.first_row[problem_.num_local_experts]; ++r)
      finish_whole_row(w, r);
  }
#pragma omp for schedule(dynamic, chunk2)
  for (std::int64_t t = 0; t < num_active * panels2; ++t)
    panel2(w, w.active[t / panels2], t % panels2);
}

}  // namespace moesaic::experts
