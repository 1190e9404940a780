#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/matrix_row.cuh"
#include "experts/sm90/repack_codes.h"

namespace moesaic::cuda {
namespace {

constexpr int kCodeBytes = 4096;  // of a slab and chunk, before its strip

// One thread per 16-byte piece of codes, that is per thread of the warpgroup and block of rows.
__global__ void repack_e2m1_codes(WeightShape shape, const std::uint8_t* __restrict__ weight,
                                  const std::uint8_t* __restrict__ scale,
                                  std::byte* __restrict__ image) {
  const std::int64_t chunks = shape.chunks();
  const std::int64_t pieces = shape.bands() * chunks * 512;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < pieces; i += step) {
    const int thread = static_cast<int>(i & 127), block = static_cast<int>(i >> 7) & 1;
    const int slab = static_cast<int>(i >> 8) & 1;
    const std::int64_t chunk = (i >> 9) % chunks, band = (i >> 9) / chunks;
    const int w = thread >> 5, g = thread >> 2 & 7, t = thread & 3;
    const std::int64_t columns = shape.columns;
    std::int64_t row[2];
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) row[hi] = matrix_row(shape, band, slab, block, w, hi, g);
    std::byte* const to = image + (i >> 8) * shape.slab_bytes;
    std::uint32_t words[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t word = 0;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::int64_t k = chunk * 64 + 16 * s + 2 * t + 8 * (r >> 1);
        const std::int64_t from = row[r & 1];
        if (from < 0 || k >= columns) continue;
        std::uint32_t pair = weight[from * (columns / 2) + k / 2];
        MOESAIC_CUDA_FAULT(cuda_repack_nibbles_swapped, pair = pair >> 4 | (pair & 15) << 4;)
        word |= place_e2m1(pair & 15, r) | place_e2m1(pair >> 4, r) << 16;
      }
      words[s] = word;
    }
    *reinterpret_cast<uint4*>(to + block * 2048 + thread * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (t != 0) continue;
    std::uint32_t strip = 0;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const std::int64_t group = chunk * 2 + unit;
        if (row[hi] < 0 || group >= columns / 32) continue;
        strip |= e2m1_factor(scale[row[hi] * (columns / 32) + group]) << (16 * hi + 8 * unit);
      }
    }
    *reinterpret_cast<std::uint32_t*>(to + kCodeBytes + block * 128 + (thread >> 2) * 4) = strip;
  }
}

}  // namespace

int repack_e2m1(const WeightShape& shape, const std::uint8_t* weight, const std::uint8_t* scale,
                std::byte* image, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  auto* const s = static_cast<cudaStream_t>(stream);
  repack_e2m1_codes<<<1024, 256, 0, s>>>(shape, weight, scale, image);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace moesaic::cuda
