// Numbers drawn by hashing an index, the same on every machine.
#pragma once

#include <cstdint>

#include "moesaic/tensor.h"

namespace moesaic::tool {

inline std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}
// Of [0, 1).
inline double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// Largest of 128*128 normal draws is about 4.2: this maps it to the largest e4m3 value.
inline constexpr float kFp8Gain = 448.0F / 4.5F;
// Of e2m1 codes that are all alike.
inline constexpr double kE2M1Sd = 2.7;

// Any bytes: two 4-bit codes each or an integer, all alike.
void fill_bytes(Tensor& t, std::uint64_t seed);
// N(0, sd^2) in F32, BF16 or F16; e4m3: N(0, 1) times kFp8Gain.
void fill_normal(Tensor& t, double sd, std::uint64_t seed);

}  // namespace moesaic::tool
