#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/sm90/matrix_row.cuh"
#include "experts/sm90/repack.h"

namespace moesaic::cuda {
namespace {

// One thread per 16-byte piece of the image.
__global__ void repack_weights(RepackShape shape, const std::byte* __restrict__ weight,
                               std::byte* __restrict__ image) {
  const std::int64_t chunks = shape.chunks();
  const std::int64_t pieces = shape.bands() * chunks * 2048;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < pieces; i += step) {
    const int piece = static_cast<int>(i & 7);
    const int r = static_cast<int>(i >> 3) & 127;
    const int slab = static_cast<int>(i >> 10) & 1;
    const std::int64_t chunk = (i >> 11) % chunks;
    const std::int64_t band = (i >> 11) / chunks;
    const int block = r >> 6, w = (r >> 4) & 3, hi = (r >> 3) & 1, g = r & 7;
    const std::int64_t row = matrix_row(shape, band, slab, block, w, hi, g);
    const std::int64_t byte = chunk * 128 + piece * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row >= 0 && byte < shape.row_bytes()) {
      v = *reinterpret_cast<const uint4*>(weight + row * shape.row_bytes() + byte);
    }
    *reinterpret_cast<uint4*>(image + (i >> 10) * 16384 + r * 128 + ((piece ^ (r & 7)) << 4)) = v;
  }
}

// Per (band, chunk): gate and up scale, or those of the band's two slabs; the rest zero.
__global__ void repack_scales(RepackShape shape, const float* __restrict__ scale,
                              float* __restrict__ image_scale) {
  const std::int64_t chunks = shape.chunks();
  const std::int64_t scale_rows = (shape.rows + 127) / 128;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= shape.bands() * chunks) return;
  const std::int64_t band = i / chunks, chunk = i % chunks;
  const std::int64_t first = shape.gated ? band : 2 * band;
  const std::int64_t second = shape.gated ? shape.rows / 256 + band : 2 * band + 1;
  float4 v = make_float4(0, 0, 0, 0);
  if (first < scale_rows) v.x = scale[first * chunks + chunk];
  if (second < scale_rows) v.y = scale[second * chunks + chunk];
  MOESAIC_CUDA_FAULT(cuda_repack_scale_of_the_first_rows, v.y = v.x;)
  reinterpret_cast<float4*>(image_scale)[i] = v;
}

}  // namespace

int repack_expert(const RepackShape& shape, const std::byte* weight, const float* scale,
                  std::byte* image, float* image_scale, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const int error = launch_kernel(repack_weights, 1024, 256, 0, stream, shape, weight, image);
  if (error != 0 || scale == nullptr) return error;
  const std::int64_t count = shape.bands() * shape.chunks();
  return launch_kernel(repack_scales, static_cast<unsigned>((count + 255) / 256), 256, 0, stream,
                       shape, scale, image_scale);
}

}  // namespace moesaic::cuda
