// Sizes of the layer that tests of the WeightLoader push, its values read back, and one rank of many.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/tensor.h"
#include "moesaic/weight_loader.h"

namespace moesaic::test {

inline constexpr std::int64_t kExperts = 4, kHidden = 6, kWidth = 8;

inline std::vector<float> floats(const ConstTensorView& view) {
  const auto* data = view.as<float>();
  return {data, data + view.shape.num_elements().value()};
}

inline WeightLoader::Options ranks(int tp, int tp_rank, int ep, int ep_rank) {
  WeightLoader::Options options;
  options.parallel.tp_size = tp;
  options.parallel.tp_rank = tp_rank;
  options.parallel.ep_size = ep;
  options.parallel.ep_rank = ep_rank;
  return options;
}

}  // namespace moesaic::test
