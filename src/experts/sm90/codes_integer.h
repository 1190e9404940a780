// How integers become bf16 operands: host and device, so that every code is tested without a GPU.
//
// The bits of an integer u from 0 to 255 are the bf16 number u * 2^-133: subnormal up to 127, and above
// still in the same steps. One fused multiply-add by 2^127 makes (u - zero) / 64 of it, exact for every
// zero point up to 255. Scales in the image are 64 times what they are, which is exact too, so that sums
// have the same bits unless a product is below 2^-120.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

inline constexpr std::uint32_t kIntegerFactor = 0x7F007F00U;  // 2^127, twice
inline constexpr std::uint32_t kSixteenthsFactor =
    0x7D007D00U;                                           // of the bits of 16 u: 2^123, twice
inline constexpr std::uint32_t kZeroFactor = 0xFF00FF00U;  // -2^127, twice: u * 2^-133 to -u / 64
inline constexpr float kIntegerUnit = 64;

}  // namespace moesaic::cuda
