#include "layer/cpu/input_norm.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cpu/team.h"
#include "cpu/tiers.h"

namespace moesaic::layer {
namespace {

constexpr double kElementUs = 1e-3;  // of one thread, at least

// In eight interleaved sums, so that a processor has several under way.
double sum_of_squares(const float* row, std::int64_t n) {
  constexpr std::int64_t kSums = 8;
  std::array<double, kSums> sums = {};
  std::int64_t h = 0;
  for (; h + kSums <= n; h += kSums) {
    for (std::int64_t i = 0; i < kSums; ++i)
      sums[static_cast<std::size_t>(i)] += double{row[h + i]} * double{row[h + i]};
  }
  double sum = 0;
  for (; h < n; ++h) sum += double{row[h]} * double{row[h]};
  for (const double part : sums) sum += part;
  return sum;
}

void scale_row(float* row, std::int64_t n, double factor) {
  for (std::int64_t h = 0; h < n; ++h) row[h] = static_cast<float>(double{row[h]} * factor);
}
void scale_row(float* row, std::int64_t n, double factor, const float* weight) {
  for (std::int64_t h = 0; h < n; ++h)
    row[h] = static_cast<float>(double{row[h]} * factor * double{weight[h]});
}

}  // namespace

void normalise_rows(const cpu::CpuKernels& kernels, const ConstTensorView& x, double eps,
                    const float* weight, float* out, int num_threads) {
  const std::int64_t rows = x.dim(0), hidden = x.dim(1);
  const std::int64_t row_bytes = x.strides[0] * (dtype_bits(x.dtype) / 8);
  const double us = kElementUs * static_cast<double>(rows) * static_cast<double>(hidden);
#pragma omp parallel num_threads(cpu::team_size(us, num_threads))
  {
    const cpu::ScopedIeeeMode ieee;
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < rows; ++t) {
      float* const row = out + t * hidden;
      kernels.load_row(static_cast<const std::byte*>(x.data) + t * row_bytes, x.dtype, hidden,
                       hidden, row);
      const double mean = sum_of_squares(row, hidden) / static_cast<double>(hidden);
      const double factor = 1.0 / std::sqrt(mean + eps);
      if (weight == nullptr) {
        scale_row(row, hidden, factor);
      } else {
        scale_row(row, hidden, factor, weight);
      }
    }
  }
}

}  // namespace moesaic::layer
