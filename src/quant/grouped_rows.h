// Rows cut into groups of columns that share a scale: shape checks and loops that the block formats
// have in common.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "numerics/element.h"
#include "quant/arguments.h"

namespace moesaic::quant {

// [.., K] -> [.., K/group]. kInvalidShape for rank 0 or when group does not divide K, naming both.
inline Result<Shape> grouped_shape(std::string_view field, const Shape& shape, std::int64_t group) {
  const int rank = shape.rank();
  if (rank < 1 || shape[rank - 1] % group != 0) {
    return Status(StatusCode::kInvalidShape,
                  std::string(field) + ": got " + shape.to_string() +
                      ", need a last dimension K that is a multiple of " + std::to_string(group));
  }
  std::array<std::int64_t, kMaxRank> dims{};
  for (int i = 0; i < rank; ++i) dims[static_cast<std::size_t>(i)] = shape[i];
  dims[static_cast<std::size_t>(rank - 1)] /= group;
  return Shape::from({dims.data(), static_cast<std::size_t>(rank)});
}

// Calls visit(values, index) for each group of kGroup elements of a contiguous tensor, with the
// group's elements as fp32.
template <std::size_t kGroup, class Visit>
void for_groups(const ConstTensorView& x, std::int64_t groups, Visit&& visit) {
  std::array<float, kGroup> values{};
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::size_t i = 0; i < kGroup; ++i) {
      values[i] = load_as_f32(x.data, x.dtype,
                              g * static_cast<std::int64_t>(kGroup) + static_cast<std::int64_t>(i));
    }
    visit(values.data(), g);
  }
}

}  // namespace moesaic::quant
