#include "gate/sm90/bf16_parts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "core/fault.h"
#include "gate/sm90/gate.h"
#include "numerics/float_codec.h"

namespace moesaic::cuda {
namespace {

using Parts = std::array<std::uint16_t, kMostGateParts>;

// How many parts v has; one more than there is room for where these do not do.
int split(float v, Parts& parts) {
  parts = {};
  int count = 0;
  for (std::uint16_t& part : parts) {
    part = bf16_from_f32(v);
    const float number = f32_from_bf16(part);
    ++count;
    if (number == v) return count;
    if (!std::isfinite(number)) break;
    v -= number;  // exact
  }
  return kMostGateParts + 1;
}

}  // namespace

int count_bf16_parts(std::span<const float> values) {
  Parts parts{};
  int count = 1;
  for (const float v : values) count = std::max(count, split(v, parts));
  if (MOESAIC_FAULT(cuda_gate_narrows_any_weight)) count = 1;
  return count > kMostGateParts ? 0 : count;
}

void split_into_bf16_parts(std::span<const float> values, std::int64_t columns, int count,
                           std::span<std::uint16_t> parts) {
  const auto width = static_cast<std::size_t>(columns), number = static_cast<std::size_t>(count);
  const bool loses = MOESAIC_FAULT(gate_loses_the_last_part);
  Parts of_value{};
  for (std::size_t i = 0; i < values.size(); ++i) {
    split(values[i], of_value);
    if (loses) of_value.back() = 0;
    for (std::size_t part = 0; part < number; ++part) {
      parts[(i / width * number + part) * width + i % width] = of_value[part];
    }
  }
}

}  // namespace moesaic::cuda
