// Small tensors for the tests of this folder.
#pragma once

#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "support/metrics.h"
#include "support/random.h"

namespace moesaic::test {

// Full of NaN patterns, so that what a function forgets to write is seen.
inline Tensor poisoned(DType dtype, const Shape& shape) {
  Tensor t = Tensor::zeros(dtype, shape).value();
  poison(t.view());
  return t;
}

template <class T>
Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<T>& values) {
  Tensor t = Tensor::zeros(dtype, shape).value();
  if (!values.empty()) std::memcpy(t.data(), values.data(), values.size() * sizeof(T));
  return t;
}
inline Tensor f32_of(const Shape& shape, const std::vector<float>& values) {
  return tensor_of(DType::kF32, shape, values);
}

inline double rel_l2(const Tensor& got, const Tensor& want) {
  return compare(to_doubles(got.view()), to_doubles(want.view())).rel_l2;
}

// The 256 x 1024 sample of N(0, 1) that the format errors are stated for.
inline Tensor gaussian(std::uint64_t seed = 7) {
  Rng rng(seed);
  return random_normal(rng, DType::kF32, {256, 1024});
}

inline std::vector<std::uint8_t> bytes_of(const Tensor& t) {
  const auto* p = t.as<std::uint8_t>();
  return {p, p + t.bytes()};
}

}  // namespace moesaic::test
