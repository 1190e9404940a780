#include "support/random.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "support/half.h"

namespace moesaic::test {

std::uint64_t Rng::next() {
  state_ += 0x9E3779B97F4A7C15ULL;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

double Rng::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

double Rng::normal() {
  const double u = 1.0 - uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * uniform());
}

std::int64_t Rng::integer(std::int64_t lo, std::int64_t hi) {
  return lo + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(hi - lo + 1));
}

namespace {

// Independent of src/numerics on purpose: rounding through the compiler's own types.
void store(Tensor& t, std::int64_t i, double value) {
  const float f = static_cast<float>(value);
  switch (t.dtype()) {
    case DType::kF32:
      t.as<float>()[i] = f;
      return;
    case DType::kF16:
      t.as<std::uint16_t>()[i] = half_code(static_cast<double>(f));
      return;
    case DType::kBF16: {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &f, 4);
      bits += 0x7FFFU + ((bits >> 16) & 1U);
      t.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(bits >> 16);
      return;
    }
    default:
      std::abort();  // test code asked for a dtype that these generators do not make
  }
}

template <class F>
Tensor fill(DType dtype, const Shape& shape, F&& next) {
  Tensor t = Tensor::zeros(dtype, shape).value();
  const std::int64_t n = shape.num_elements().value();
  for (std::int64_t i = 0; i < n; ++i) store(t, i, next());
  return t;
}

}  // namespace

Tensor random_normal(Rng& rng, DType dtype, const Shape& shape, double sd) {
  return fill(dtype, shape, [&] { return sd * rng.normal(); });
}

Tensor random_integers(Rng& rng, DType dtype, const Shape& shape, int bound) {
  return fill(dtype, shape, [&] { return static_cast<double>(rng.integer(-bound, bound)); });
}

void poison(void* data, std::int64_t bytes) {
  if (bytes > 0) std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
}

void poison(TensorView t) { poison(t.data, contiguous_bytes(t.dtype, t.shape).value()); }

}  // namespace moesaic::test
