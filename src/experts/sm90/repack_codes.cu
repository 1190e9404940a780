#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_int4_fp8.h"
#include "experts/sm90/codes_nvfp4.h"
#include "experts/sm90/matrix_row.cuh"
#include "experts/sm90/repack_codes.h"

namespace moesaic::cuda {
namespace {

constexpr int kChunk = 64;                           // elements of K
constexpr int kE2m1Bytes = 4096, kE4m3Bytes = 8192;  // of a slab and chunk, before its strip

// Where a piece of 16 bytes of codes stands.
struct PlaceOfPiece {
  std::int64_t slab;  // of all
  std::int64_t chunk;
  std::int64_t row[2];  // matrix rows g and g + 8; -1: past the matrix
  int block, thread, t;

  __device__ PlaceOfPiece(const WeightShape& shape, std::int64_t all_slabs, int in_block,
                          int which) {
    slab = all_slabs;
    block = which;
    thread = in_block;
    t = thread & 3;
    const std::int64_t chunks = shape.chunks();
    chunk = (slab >> 1) % chunks;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      row[hi] = matrix_row(shape, (slab >> 1) / chunks, static_cast<int>(slab & 1), block,
                           thread >> 5, hi, thread >> 2 & 7);
    }
  }
};

// Exponent fields of two groups of 32.
struct ThirtySecondStrip {
  const std::uint8_t* fields;

  __device__ std::uint32_t code(std::uint32_t code, std::int64_t, std::int64_t) const {
    return code;
  }
  __device__ void store(const PlaceOfPiece& at, std::int64_t columns, std::byte* strip) const {
    std::uint32_t word = 0;
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const std::int64_t group = at.chunk * 2 + unit;
        if (at.row[hi] < 0 || group >= columns / 32) continue;
        word |= static_cast<std::uint32_t>(fields[at.row[hi] * (columns / 32) + group])
                << (16 * hi + 8 * unit);
      }
    }
    *reinterpret_cast<std::uint32_t*>(strip + at.block * 128 + (at.thread >> 2) * 4) = word;
  }
};

// e4m3 scales of four groups of 16.
struct SixteenthStrip {
  const std::uint8_t* scale;

  __device__ std::uint32_t code(std::uint32_t code, std::int64_t row, std::int64_t group) const {
    return nvfp4_code(code, scale[group + row]);
  }
  __device__ void store(const PlaceOfPiece& at, std::int64_t columns, std::byte* strip) const {
    std::uint32_t words[2] = {};
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::int64_t group = at.chunk * 4 + step;
        if (at.row[hi] < 0 || group >= columns / 16) continue;
        const std::uint32_t magnitude = scale[at.row[hi] * (columns / 16) + group] & 0x7F;
        if (magnitude != 0) words[hi] |= nvfp4_strip(magnitude) << (8 * step);
      }
    }
    *reinterpret_cast<uint2*>(strip + at.block * 256 + (at.thread >> 2) * 8) =
        make_uint2(words[0], words[1]);
  }
};

// One thread per 16-byte piece of codes, that is per thread of the warpgroup and block of rows.
template <class Strip>
__global__ void repack_e2m1_codes(WeightShape shape, const std::uint8_t* __restrict__ weight,
                                  Strip strip, std::byte* __restrict__ image) {
  const std::int64_t pieces = shape.bands() * shape.chunks() * 512, columns = shape.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < pieces; i += step) {
    const PlaceOfPiece at(shape, i >> 8, static_cast<int>(i & 127), static_cast<int>(i >> 7) & 1);
    std::byte* const to = image + at.slab * shape.slab_bytes;
    std::uint32_t words[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t word = 0;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::int64_t k = at.chunk * kChunk + 16 * s + 2 * at.t + 8 * (r >> 1);
        const std::int64_t from = at.row[r & 1];
        if (from < 0 || k >= columns) continue;
        std::uint32_t pair = weight[from * (columns / 2) + k / 2];
        MOESAIC_CUDA_FAULT(cuda_repack_nibbles_swapped, pair = pair >> 4 | (pair & 15) << 4;)
        const std::int64_t first = from * (columns / 16);
        word |= place_e2m1(strip.code(pair & 15, first, k / 16),
                           strip.code(pair >> 4, first, k / 16), r);
      }
      words[s] = word;
    }
    *reinterpret_cast<uint4*>(to + at.block * 2048 + at.thread * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (at.t == 0) strip.store(at, columns, to + kE2m1Bytes);
  }
}

__global__ void repack_e4m3_codes(WeightShape shape, const std::uint8_t* __restrict__ weight,
                                  ThirtySecondStrip strip, std::byte* __restrict__ image) {
  const std::int64_t pieces = shape.bands() * shape.chunks() * 1024, columns = shape.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < pieces; i += step) {
    const int half = static_cast<int>(i >> 7) & 1;
    const PlaceOfPiece at(shape, i >> 9, static_cast<int>(i & 127), static_cast<int>(i >> 8) & 1);
    std::byte* const to = image + at.slab * shape.slab_bytes;
    std::uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // step 2 half + q / 2, registers 2 (q % 2) and the next
      std::uint32_t word = 0;
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        const std::int64_t k =
            at.chunk * kChunk + 16 * (2 * half + (q >> 1)) + 2 * at.t + 8 * (q & 1);
        const std::int64_t from = at.row[hi];
        if (from < 0 || k >= columns) continue;
        const std::uint32_t pair =
            *reinterpret_cast<const std::uint16_t*>(weight + from * columns + k);
        word |= place_e4m3(pair & 0xFF, hi, 0) | place_e4m3(pair >> 8, hi, 1);
      }
      words[q] = word;
    }
    *reinterpret_cast<uint4*>(to + at.block * 4096 + half * 2048 + at.thread * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (at.t == 0 && half == 0) strip.store(at, columns, to + kE4m3Bytes);
  }
}

// A word per row of a k32 step: sixteen bits of codes, and those of sixteen elements further.
__global__ void repack_int4_codes(WeightShape shape, const std::uint8_t* __restrict__ weight,
                                  const std::uint8_t* __restrict__ scale, std::int64_t group,
                                  std::byte* __restrict__ image) {
  const std::int64_t pieces = shape.bands() * shape.chunks() * 1024, columns = shape.columns;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < pieces; i += step) {
    const int half = static_cast<int>(i >> 7) & 1;
    const PlaceOfPiece at(shape, i >> 9, static_cast<int>(i & 127), static_cast<int>(i >> 8) & 1);
    std::byte* const to = image + at.slab * shape.slab_bytes;
    std::uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // step 2 half + q / 2, row q % 2
      const std::int64_t k = at.chunk * 128 + 32 * (2 * half + (q >> 1)) + 4 * at.t;
      const std::int64_t from = at.row[q & 1];
      words[q] = int4_fp8_codes(0);
      if (from < 0 || k >= columns) continue;
      const auto* const codes =
          reinterpret_cast<const std::uint16_t*>(weight + from * (columns / 2) + k / 2);
      words[q] = int4_fp8_codes(static_cast<std::uint32_t>(codes[0]) |
                                static_cast<std::uint32_t>(codes[4]) << 16);
      MOESAIC_CUDA_FAULT(cuda_repack_nibbles_swapped,
                         words[q] = (words[q] >> 4 & 0x0F0F0F0FU) | (words[q] & 0x0F0F0F0FU) << 4;)
    }
    *reinterpret_cast<uint4*>(to + at.block * 4096 + half * 2048 + at.thread * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (at.t != 0 || half != 0) continue;
    Int4Multiples pair[2] = {};
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      if (at.row[hi] < 0) continue;
      std::int64_t which = at.chunk * 128 / group;
      MOESAIC_CUDA_FAULT(cuda_codes_have_the_first_scale, which = 0;)
      pair[hi] = int4_multiples(scale[at.row[hi] * (columns / group) + which]);
    }
    *reinterpret_cast<uint4*>(to + kE4m3Bytes + at.block * 512 + (at.thread >> 2) * 16) =
        make_uint4(pair[0].low, pair[0].high, pair[1].low, pair[1].high);
  }
}

}  // namespace

int repack_int4_fp8_codes(const WeightShape& shape, const std::uint8_t* weight,
                          const std::uint8_t* scale, std::int64_t group, std::byte* image,
                          void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_kernel(repack_int4_codes, 1024, 256, 0, stream, shape, weight, scale, group, image);
}

int repack_e2m1(const WeightShape& shape, const std::uint8_t* weight, const std::uint8_t* fields,
                std::byte* image, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_kernel(repack_e2m1_codes<ThirtySecondStrip>, 1024, 256, 0, stream, shape, weight,
                       ThirtySecondStrip{fields}, image);
}

int repack_nvfp4_codes(const WeightShape& shape, const std::uint8_t* weight,
                       const std::uint8_t* scale, std::byte* image, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_kernel(repack_e2m1_codes<SixteenthStrip>, 1024, 256, 0, stream, shape, weight,
                       SixteenthStrip{scale}, image);
}

int repack_e4m3(const WeightShape& shape, const std::uint8_t* weight, const std::uint8_t* fields,
                std::byte* image, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_kernel(repack_e4m3_codes, 1024, 256, 0, stream, shape, weight,
                       ThirtySecondStrip{fields}, image);
}

}  // namespace moesaic::cuda
