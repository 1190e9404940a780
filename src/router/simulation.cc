#include "router/simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <new>
#include <numbers>

#include "moesaic/router.h"
#include "router/scoring.h"

namespace moesaic {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): tiny, and any 64-bit number is a good seed.
class RowGenerator {
 public:
  RowGenerator(std::uint64_t seed, std::int64_t row) : state_(seed) {
    state_ = next() ^ (static_cast<std::uint64_t>(row) * 0xD1B54A32D192ED03ULL);
  }
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  double normal() {                                                         // Box and Muller
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  std::uint64_t state_;
};

Status uniform_random(std::uint64_t seed, std::int64_t num_experts, TensorView weights,
                      TensorView ids) {
  const std::int64_t k = ids.dim(1);
  for (std::int64_t t = 0; t < ids.dim(0); ++t) {
    RowGenerator rng(seed, t);
    for (std::int64_t j = 0; j < k; ++j) {
      const auto id = static_cast<std::int64_t>(rng.uniform() * static_cast<double>(num_experts));
      ids.as<std::int32_t>()[t * k + j] = static_cast<std::int32_t>(std::min(id, num_experts - 1));
      weights.as<float>()[t * k + j] = 1.0F;
    }
  }
  return {};
}

Status normal_routing(std::uint64_t seed, std::int64_t num_experts, TensorView weights,
                      TensorView ids) {
  const std::int64_t k = ids.dim(1);
  for (std::int64_t t = 0; t < ids.dim(0); ++t) {
    RowGenerator rng(seed, t);
    float* w = weights.as<float>() + t * k;
    float sum = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      const double s = 1.0 / (1.0 + std::exp(-rng.normal()));
      const auto id = static_cast<std::int64_t>(std::floor(s * static_cast<double>(num_experts)));
      ids.as<std::int32_t>()[t * k + j] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(id, 0, num_experts - 1));
      w[j] = static_cast<float>(std::abs(rng.normal()));
      sum += w[j];
    }
    if (sum <= 0) sum = 1;
    for (std::int64_t j = 0; j < k; ++j) w[j] /= sum;
  }
  return {};
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, SimulationStrategyFn> strategies = {{"uniform_random", uniform_random},
                                                            {"normal_routing", normal_routing}};
};

Registry& registry() {
  static Registry r;
  return r;
}

}  // namespace

Status register_simulation_strategy(const std::string& name, SimulationStrategyFn strategy) {
  if (name.empty() || !strategy) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("simulation strategy: got name '{}' and {} function, need both", name,
                              strategy ? "a" : "no"));
  }
  try {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    if (!r.strategies.emplace(name, std::move(strategy)).second) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("simulation strategy: '{}' is registered already, need a new name", name));
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "simulation strategy: cannot register");
  }
}

}  // namespace moesaic

namespace moesaic::router {

Result<SimulationStrategyFn> find_simulation_strategy(const std::string& name) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.strategies.find(name);
  if (found != r.strategies.end()) return found->second;
  std::string known;
  for (const auto& [key, strategy] : r.strategies) {
    known += (known.empty() ? "" : ", ") + key;
  }
  return Status(StatusCode::kNotFound,
                fmt::format("simulation_strategy: got '{}', need one of {}", name, known));
}

}  // namespace moesaic::router
