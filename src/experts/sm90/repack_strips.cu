#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/sm90/codes_bytes.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_int4.h"
#include "experts/sm90/codes_int6.h"
#include "experts/sm90/codes_table.h"
#include "experts/sm90/matrix_row.cuh"
#include "experts/sm90/repack_strips.h"

namespace moesaic::cuda {
namespace {

// Adds a code of a k16 step, as element `element` of register `index`, to a thread's words.
template <CodePlaces kPlaces>
__device__ __forceinline__ void place_code(std::uint32_t code, int step, int index, int element,
                                           std::uint32_t* words) {
  if constexpr (kPlaces == CodePlaces::kInt4) {
    words[step] |= place_int4(code, index, element);
  } else if constexpr (kPlaces == CodePlaces::kTable) {
    words[step] |= place_index(code, index, element);
  } else if constexpr (kPlaces == CodePlaces::kInt6) {
    place_int6(code, 4 * (step & 1) + index, element, words + kInt6Words * (step >> 1));
  } else if constexpr (kPlaces == CodePlaces::kE4m3) {
    words[2 * step + (index >> 1)] |= place_e4m3(code, index & 1, element);
  } else {
    words[2 * step + (index >> 1)] |= place_byte(code, index, element);
  }
}

// The integers and F16 numbers of rows g and g + 8 of a block, quad: 8 * warp + g. strip: where these begin.
__device__ void store_super_scales(const CodeImage& codes, const CodeSource& source,
                                   const std::int64_t (&row)[2], std::int64_t chunk,
                                   std::int64_t chunks, int block, int quad, std::byte* slab,
                                   int strip) {
#pragma unroll
  for (int hi = 0; hi < 2; ++hi) {
    const std::int64_t from = row[hi] * chunks + chunk;
    for (int u = 0; u < codes.units; ++u) {
      const int at = (block * (codes.units / 2) + (u >> 1)) * 128 + quad * 4 + 2 * hi + (u & 1);
      reinterpret_cast<std::uint8_t*>(slab)[strip + at] =
          row[hi] < 0 ? 128 : source.codes[from * codes.units + u];
    }
    *reinterpret_cast<std::uint16_t*>(slab + codes.low_at + (block * 32 + quad) * 4 + 2 * hi) =
        row[hi] < 0 ? 0 : source.super[from];
  }
}

// One thread per thread of a warpgroup and block of rows.
template <CodePlaces kPlaces>
__global__ void repack_code_words(WeightShape shape, CodeImage codes, CodeSource source,
                                  std::byte* __restrict__ image) {
  constexpr bool kStoredBytes = kPlaces != CodePlaces::kInt4 && kPlaces != CodePlaces::kTable;
  constexpr int kWords = !kStoredBytes                  ? 4  // of a thread
                         : kPlaces == CodePlaces::kInt6 ? 2 * kInt6Words
                                                        : 8;
  const std::int64_t chunks = shape.chunks(), columns = shape.columns;
  const std::int64_t count = shape.bands() * chunks * 512;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const int thread = static_cast<int>(i & 127), block = static_cast<int>(i >> 7) & 1;
    const int slab = static_cast<int>(i >> 8) & 1;
    const std::int64_t chunk = (i >> 9) % chunks, band = (i >> 9) / chunks;
    const int w = thread >> 5, g = thread >> 2 & 7, t = thread & 3;
    std::int64_t row[2];
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) row[hi] = matrix_row(shape, band, slab, block, w, hi, g);
    std::byte* const to = image + (i >> 8) * shape.slab_bytes;
    std::uint32_t words[kWords] = {};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::int64_t k = chunk * 64 + 16 * s + 2 * t + 8 * (r >> 1);
        const std::int64_t from = row[r & 1];
        if (from < 0 || k >= columns) continue;
        std::uint32_t pair[2];
        if constexpr (kStoredBytes) {
          pair[0] = source.weight[from * columns + k];
          pair[1] = source.weight[from * columns + k + 1];
        } else {
          const std::uint32_t both = source.weight[from * (columns / 2) + k / 2];
          pair[0] = both & 15;
          pair[1] = both >> 4;
          MOESAIC_CUDA_FAULT(cuda_repack_nibbles_swapped, pair[0] = both >> 4; pair[1] = both & 15;)
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          place_code<kPlaces>((pair[e] ^ source.flip) & source.mask, s, r, e, words);
        }
      }
    }
    // Bytes of a block: a piece after the other. Six bits: the second pieces of both blocks last.
    constexpr int kBlockBytes = kWords == 8 ? 4096 : 2048;
#pragma unroll
    for (int piece = 0; piece < kWords / 4; ++piece) {
      *reinterpret_cast<uint4*>(to + block * kBlockBytes + piece * 2048 + thread * 16) = make_uint4(
          words[4 * piece], words[4 * piece + 1], words[4 * piece + 2], words[4 * piece + 3]);
    }
    if constexpr (kWords % 4 != 0) {
      *reinterpret_cast<uint2*>(to + 2 * kBlockBytes + block * 1024 + thread * 8) =
          make_uint2(words[4], words[5]);
    }
    if (t != 0) continue;
    if (source.super != nullptr) {
      store_super_scales(codes, source, row, chunk, chunks, block, thread >> 2, to, 1024 * kWords);
    }
    for (int u = 0; u < codes.units; ++u) {
      const int at = (block * codes.units + u) * 32 + (thread >> 2);
      std::uint32_t upper = 0, lower = 0, zero = 0, offset = 0;
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        if (row[hi] < 0) continue;
        const std::int64_t unit = (row[hi] * chunks + chunk) * codes.units + u;
        if (source.upper != nullptr) {
          upper |= static_cast<std::uint32_t>(source.upper[unit]) << (16 * hi);
        }
        if (source.lower != nullptr) {
          lower |= static_cast<std::uint32_t>(source.lower[unit])
                   << ((source.lower_bytes ? 8 : 16) * hi);
        }
        if (codes.zero_at != 0) zero |= static_cast<std::uint32_t>(source.zero[unit]) << (8 * hi);
        if (codes.offset_at != 0) {
          offset |= static_cast<std::uint32_t>(source.offset[unit]) << (16 * hi);
        }
      }
      if (source.upper != nullptr) {
        *reinterpret_cast<std::uint32_t*>(to + 1024 * kWords + at * 4) = upper;
      }
      if (source.lower != nullptr && source.lower_bytes) {
        *reinterpret_cast<std::uint16_t*>(to + codes.low_at + at * 2) =
            static_cast<std::uint16_t>(lower);
      } else if (source.lower != nullptr) {
        *reinterpret_cast<std::uint32_t*>(to + codes.low_at + at * 4) = lower;
      }
      if (codes.zero_at != 0) {
        *reinterpret_cast<std::uint16_t*>(to + codes.zero_at + at * 2) =
            static_cast<std::uint16_t>(zero);
      }
      if (codes.offset_at != 0) {
        *reinterpret_cast<std::uint32_t*>(to + codes.offset_at + at * 4) = offset;
      }
    }
  }
}

}  // namespace

int repack_with_strips(const WeightShape& shape, const CodeImage& codes, const CodeSource& source,
                       std::byte* image, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const auto run = [&](auto* kernel) {
    return launch_kernel(kernel, 1024, 256, 0, stream, shape, codes, source, image);
  };
  switch (source.places) {
    case CodePlaces::kInt4:
      return run(repack_code_words<CodePlaces::kInt4>);
    case CodePlaces::kTable:
      return run(repack_code_words<CodePlaces::kTable>);
    case CodePlaces::kInt6:
      return run(repack_code_words<CodePlaces::kInt6>);
    case CodePlaces::kE4m3:
      return run(repack_code_words<CodePlaces::kE4m3>);
    default:
      return run(repack_code_words<CodePlaces::kBytes>);
  }
}

}  // namespace moesaic::cuda
