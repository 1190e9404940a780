#include "bench_draws.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "core/checked.h"
#include "numerics/codec.h"

namespace moesaic::tool {
namespace {

// 65536 draws of N(0, 1): elements are picked from it by hashed index, which costs a quarter of a
// hash per element.
const std::vector<float>& normals() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1U << 16);
    for (std::size_t i = 0; i < t.size(); ++i) {
      const double u = 1.0 - unit(mix(2 * i)), v = unit(mix(2 * i + 1));
      t[i] =
          static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
    }
    return t;
  }();
  return table;
}

template <class T>
std::vector<T> encode_table(DType dtype, double sd) {
  std::vector<T> codes(normals().size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const float x = static_cast<float>(normals()[i] * sd);
    if constexpr (sizeof(T) == 4) {
      codes[i] = x;
    } else if constexpr (sizeof(T) == 2) {
      codes[i] = dtype == DType::kBF16 ? bf16_from_f32(x) : f16_from_f32(x);
    } else {
      codes[i] = e4m3_from_f32(normals()[i] * kFp8Gain);
    }
  }
  return codes;
}

template <class T>
void fill(T* out, std::int64_t n, const std::vector<T>& table, std::uint64_t seed) {
  constexpr std::int64_t kBlock = 1 << 14;
#pragma omp parallel for schedule(static) if (n > kBlock)
  for (std::int64_t b = 0; b < ceil_div(n, kBlock); ++b) {
    std::uint64_t state = mix(seed ^ mix(static_cast<std::uint64_t>(b)));
    const std::int64_t end = std::min(n, (b + 1) * kBlock);
    std::uint64_t bits = 0;
    for (std::int64_t i = b * kBlock; i < end; ++i) {
      if (i % 4 == 0) bits = state = mix(state);
      out[i] = table[bits & 0xFFFFU];
      bits >>= 16;
    }
  }
}

}  // namespace

void fill_bytes(Tensor& t, std::uint64_t seed) {
  std::vector<std::uint8_t> all(1U << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i);
  fill(t.as<std::uint8_t>(), t.bytes(), all, seed);
}

void fill_normal(Tensor& t, double sd, std::uint64_t seed) {
  const std::int64_t n = t.bytes() * 8 / dtype_bits(t.dtype());
  switch (dtype_bits(t.dtype())) {
    case 32:
      fill(t.as<float>(), n, encode_table<float>(t.dtype(), sd), seed);
      return;
    case 16:
      fill(t.as<std::uint16_t>(), n, encode_table<std::uint16_t>(t.dtype(), sd), seed);
      return;
    default:
      fill(t.as<std::uint8_t>(), n, encode_table<std::uint8_t>(t.dtype(), sd), seed);
      return;
  }
}

}  // namespace moesaic::tool
