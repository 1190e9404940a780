// What the kernels that route share: fp32 numbers as keys of the same order, and the CPU's sum.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

// fp32 numbers as unsigned ones of the same order; both zeros are one. 0 stands for "not a
// candidate" and is below every number, kNanKey for a candidate that loses against every number.
inline constexpr std::uint32_t kTaken = 0, kNanKey = 1, kMinusInfinityKey = 0x007FFFFF;
__device__ __forceinline__ std::uint32_t key_of(float v) {
  const std::uint32_t u = v == 0 ? 0 : __float_as_uint(v);
  return (u & 0x80000000U) != 0 ? ~u : u | 0x80000000U;
}
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key ^ 0x80000000U : ~key);
}
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000U); }

// What LaneSum computes.
__device__ __forceinline__ float add_lanes(float v) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(kAllLanes, v, distance);
  return v;
}

}  // namespace moesaic::cuda
