#include "layer/cpu/row_sums.h"

#include <algorithm>

#include "core/fault.h"
#include "cpu/team.h"
#include "cpu/tiers.h"

namespace moesaic::layer {
namespace {

constexpr std::int64_t kBlock = 512;  // columns at a time: they stay in L1

bool has_row(const RowPart& part, std::int64_t t) {
  if (part.rows == nullptr) return false;
  if (MOESAIC_FAULT(layer_part_of_some_rows_in_all)) return true;
  return part.only.count < 0 || (t >= part.only.first && t < part.only.first + part.only.count);
}

void multiply(const float* from, float factor, std::int64_t n, float* __restrict to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = factor * from[i];
}
void add(const float* from, float factor, std::int64_t n, float* __restrict to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

}  // namespace

void add_row_parts(const cpu::CpuKernels& kernels, const std::array<RowPart, 3>& parts,
                   RowRange rows, const TensorView& output, int num_threads) {
  const std::int64_t hidden = output.dim(1), element = dtype_bits(output.dtype) / 8;
  double bytes = static_cast<double>(element);
  for (const RowPart& part : parts) bytes += part.rows != nullptr ? sizeof(float) : 0;
  const double us =
      cpu::one_thread_us(bytes * static_cast<double>(rows.count) * static_cast<double>(hidden), 0);
#pragma omp parallel num_threads(cpu::team_size(us, num_threads))
  {
    const cpu::ScopedIeeeMode ieee;
#pragma omp for schedule(static)
    for (std::int64_t t = rows.first; t < rows.first + rows.count; ++t) {
      alignas(64) float sum[kBlock];
      for (std::int64_t h = 0; h < hidden; h += kBlock) {
        const std::int64_t n = std::min(kBlock, hidden - h);
        for (std::size_t p = 0; p < parts.size(); ++p) {
          const RowPart& part = parts[p];
          if (!has_row(part, t)) continue;
          const std::int64_t row = t - part.first;
          const bool own = part.factors != nullptr && !MOESAIC_FAULT(layer_factor_of_all_rows);
          const float factor = own ? part.factors[row] : part.factor;
          (p == 0 ? multiply : add)(part.rows + row * hidden + h, factor, n, sum);
        }
        kernels.store_row(sum, n, output.dtype, output.data + (t * hidden + h) * element);
      }
    }
  }
}

}  // namespace moesaic::layer
