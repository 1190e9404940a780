// Choices of tests that draw their cases from a seed, and which cases they draw.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "support/random.h"

namespace moesaic::test {

// True with a probability of p.
inline bool chance(Rng& rng, double p) { return rng.uniform() < p; }
template <class T>
T pick(Rng& rng, const std::vector<T>& of) {
  return of[static_cast<std::size_t>(rng.integer(0, std::ssize(of) - 1))];
}

// The seeds of a run: from 1 on, as many as the test says; MOESAIC_RANDOM_SEED (the first) and
// MOESAIC_RANDOM_CASES say others.
struct Seeds {
  std::uint64_t first, cases;
  std::uint64_t end() const { return first + cases; }
};
inline Seeds seeds_of_run(std::uint64_t cases) {
  const auto setting = [](const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
  };
  return {setting("MOESAIC_RANDOM_SEED", 1), setting("MOESAIC_RANDOM_CASES", cases)};
}

}  // namespace moesaic::test
