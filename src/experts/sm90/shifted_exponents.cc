#include "experts/sm90/shifted_exponents.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/fault.h"
#include "core/refusal.h"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/codes_e4m3.h"

namespace moesaic::cuda {

const FactorRange kE2m1Factors = {e2m1_factor(0), kLeastE2m1Scale, kLargestE2m1Scale};
const FactorRange kE4m3Factors = {e4m3_factor(0), kLeastE4m3Scale, kLargestE4m3Scale};

Result<ShiftedExponents> shift_exponents(std::string_view field, const FactorRange& range,
                                         const ConstTensorView& weight,
                                         const ConstTensorView& scale) {
  const std::int64_t rows = scale.dim(0), groups = scale.dim(1);
  const bool four_bits = dtype_bits(weight.dtype) == 4;
  const std::int64_t bytes = four_bits ? 16 : 32;  // of a group's codes
  const int sign_free = four_bits ? 0x77 : 0x7F;
  ShiftedExponents to;
  to.fields.resize(static_cast<std::size_t>(rows * groups));
  to.factors.resize(static_cast<std::size_t>(rows), 1.0F);
  for (std::int64_t n = 0; n < rows; ++n) {
    const auto* const exponents = scale.as<std::uint8_t>() + n * groups;
    const auto [low, high] = std::minmax_element(exponents, exponents + groups);
    int shift = 0;
    if (*low < range.least || *high > range.largest) {
      int least = 255, largest = -1;  // of groups that are not zero
      for (std::int64_t g = 0; g < groups; ++g) {
        const auto* const codes = weight.as<std::uint8_t>() + (n * groups + g) * bytes;
        if (std::none_of(codes, codes + bytes, [&](int c) { return (c & sign_free) != 0; })) {
          continue;
        }
        least = std::min<int>(least, exponents[g]);
        largest = std::max<int>(largest, exponents[g]);
      }
      if (largest > range.largest) {
        shift = largest - range.largest;
      } else if (largest >= 0 && least < range.least) {
        shift = least - range.least;
      }
      if (largest - shift > range.largest || (largest >= 0 && least - shift < range.least)) {
        return unsupported(
            fmt::format("{}: got 2^{} and 2^{} in row {}, need scales of a row within a factor of "
                        "2^{} on a GPU",
                        field, least - 127, largest - 127, n, range.largest - range.least));
      }
      if (MOESAIC_FAULT(experts_shifted_scales_lose_their_factor)) {
        to.factors[static_cast<std::size_t>(n)] = 1.0F;
      } else {
        to.factors[static_cast<std::size_t>(n)] = std::ldexp(1.0F, shift);
      }
    }
    for (std::int64_t g = 0; g < groups; ++g) {
      to.fields[static_cast<std::size_t>(n * groups + g)] =
          static_cast<std::uint8_t>(std::clamp(range.base + exponents[g] - shift, 0, 254));
    }
  }
  return to;
}

}  // namespace moesaic::cuda
