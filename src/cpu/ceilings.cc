#include "cpu/ceilings.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "core/instrumented.h"
#include "cpu/packed_weights.h"
#include "cpu/tiers.h"

namespace moesaic::cpu {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Instrumented loops measure their checks: they only run.
constexpr bool kOnlyRun = MOESAIC_INSTRUMENTED;
constexpr int kPasses = kOnlyRun ? 1 : 7;
// Far beyond any last-level cache of one socket share.
constexpr std::int64_t kReadBytes = std::int64_t{kOnlyRun ? 4 : 512} << 20;

double read_seconds(const CpuKernels& kernels, const std::byte* data, int threads) {
  const std::int64_t slice = kReadBytes / threads / 256 * 256;
  std::uint32_t sum = 0;
  std::int64_t bytes = 0;  // of the threads there are: a team may be smaller than requested
  const double begin = seconds();
#pragma omp parallel num_threads(threads) reduction(^ : sum) reduction(+ : bytes)
  {
    sum ^= kernels.read_loop(data + omp_get_thread_num() * slice, slice);
    bytes += slice;
  }
  const double end = seconds();
  volatile std::uint32_t keep = sum;
  static_cast<void>(keep);
  return (end - begin) * static_cast<double>(kReadBytes) / static_cast<double>(bytes);
}

// Operations of one thread.
double multiply_add(const CpuKernels& kernels, OperandKind operand, std::int64_t iterations,
                    float* operands) {
  if (operand != OperandKind::kI8) return kernels.multiply_add_loop(operand, iterations, operands);
  std::int32_t words[kMultiplyAddFloats];
  std::memcpy(words, operands, sizeof(words));
  return kernels.multiply_add_loop_i8(iterations, words);
}

// Values of both signs between a half and one: chains neither vanish nor overflow.
void fill_operands(float* operands) {
  std::uint32_t state = 0x9E3779B9U;
  for (int i = 0; i < kMultiplyAddFloats; ++i) {
    state = state * 1664525U + 1013904223U;
    const float magnitude = 0.5F + static_cast<float>(state >> 9) * 0x1p-24F;
    operands[i] = (state & 0x100U) != 0 ? magnitude : -magnitude;
  }
}

}  // namespace

Result<Ceilings> measure_ceilings(const CpuKernels& kernels, OperandKind operand, int num_threads) {
  const int threads = resolve_threads(num_threads);
  MOESAIC_ASSIGN_OR_RETURN(WeightBuffer buffer, WeightBuffer::allocate(kReadBytes));
  const std::int64_t slice = kReadBytes / threads / 256 * 256;
  // Each thread touches its own pages first, so that they lie in its memory.
#pragma omp parallel num_threads(threads)
  std::memset(buffer.data() + omp_get_thread_num() * slice, 1, static_cast<std::size_t>(slice));

  Ceilings best;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double s = read_seconds(kernels, buffer.data(), threads);
    best.read_gbps = std::max(best.read_gbps, static_cast<double>(kReadBytes) / s * 1e-9);
  }
  // Shorter than a time slice: on a busy machine some pass is not interrupted.
  constexpr std::int64_t kIterations = kOnlyRun ? 1'000 : 500'000;
  constexpr int kMultiplyPasses = 8 * kPasses;
  for (int pass = 0; pass < kMultiplyPasses; ++pass) {
    double flops = 0;
    const double begin = seconds();
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
      float operands[kMultiplyAddFloats];
      fill_operands(operands);
      flops += multiply_add(kernels, operand, kIterations, operands);
    }
    best.gflops = std::max(best.gflops, flops / (seconds() - begin) * 1e-9);
  }
  return best;
}

}  // namespace moesaic::cpu
