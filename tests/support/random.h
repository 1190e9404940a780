// Seeded inputs for tests: everything derives from one seed, on every platform alike.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/tensor.h"

namespace moesaic::test {

// SplitMix64: small, well mixed, the same numbers everywhere.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  double uniform();                                        // [0, 1)
  double normal();                                         // N(0, 1)
  std::int64_t integer(std::int64_t lo, std::int64_t hi);  // inclusive

 private:
  std::uint64_t state_;
};

// N(0, sd^2) rounded to the dtype (F32, BF16, F16).
Tensor random_normal(Rng& rng, DType dtype, const Shape& shape, double sd = 1.0);
// Integers in [-bound, bound], exact in the dtype: sums of products stay exact, so results can be
// compared by bits.
Tensor random_integers(Rng& rng, DType dtype, const Shape& shape, int bound);
// Fills raw bytes with a NaN pattern of every float format (0xFF), to poison outputs and
// workspaces.
void poison(TensorView t);
void poison(void* data, std::int64_t bytes);

}  // namespace moesaic::test
