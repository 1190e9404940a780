// Exponential, logarithm and power from double additions, multiplications and divisions alone: IEEE
// arithmetic rounds these alike everywhere, so every device that does not contract them (the
// library is compiled so; CUDA files that include this need --fmad=false) returns the same bits.
// For the router, whose choice of experts must not depend on the device. Slower than a vendor's
// functions.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace moesaic {

// e^x in double, relative error <= 2^-31 for -110 <= x <= 90; 0 below and infinity above, which is
// what an fp32 result rounds to. NaN stays NaN.
MOESAIC_HOST_DEVICE inline double portable_exp_f64(double x) {
  if (!(x >= -110.0)) return x != x ? x : 0.0;
  if (x > 90.0) return std::numeric_limits<double>::infinity();
  // Adding 1.5 * 2^52 rounds to an integer, which is then in the low bits: x = k ln 2 + r.
  constexpr double kRound = 0x1.8p52;
  const double shifted = x * 0x1.71547652b82fep+0 + kRound;
  const double r = x - (shifted - kRound) * 0x1.62e42fefa39efp-1;
  // Taylor series to r^8: |r| <= 0.347 leaves r^9 / 9! < 2^-32. In pairs, so that half of the
  // operations do not wait for each other.
  const double r2 = r * r;
  const double r4 = r2 * r2;
  const double low = (1.0 + r) + r2 * (1.0 / 2 + r * (1.0 / 6));
  const double high = (1.0 / 24 + r * (1.0 / 120)) + r2 * (1.0 / 720 + r * (1.0 / 5040));
  const double sum = low + r4 * (high + r4 * (1.0 / 40320));
  const std::uint64_t exponent = std::bit_cast<std::uint64_t>(shifted) + 1023;
  return sum * std::bit_cast<double>(exponent << 52);
}

// e^x rounded to fp32: within 0.51 ulp.
MOESAIC_HOST_DEVICE inline float portable_exp(float x) {
  return static_cast<float>(portable_exp_f64(static_cast<double>(x)));
}

// log((1 + s) / (1 - s)) for |s| <= 1/3, relative error <= 2^-35.
MOESAIC_HOST_DEVICE inline double portable_log_ratio(double s) {
  const double z = s * s;
  double sum = (1.0 / 21 * z + 1.0 / 19) * z + 1.0 / 17;
  sum = ((sum * z + 1.0 / 15) * z + 1.0 / 13) * z + 1.0 / 11;
  sum = (((sum * z + 1.0 / 9) * z + 1.0 / 7) * z + 1.0 / 5) * z + 1.0 / 3;
  return 2.0 * s * (sum * z + 1.0);
}

// log(1 + e^x), softplus, rounded to fp32. +infinity stays, NaN stays.
MOESAIC_HOST_DEVICE inline float portable_softplus(float x) {
  const double t = portable_exp_f64(x < 0 ? static_cast<double>(x) : -static_cast<double>(x));
  const double log1p = portable_log_ratio(t / (2.0 + t));
  return static_cast<float>((x > 0 ? static_cast<double>(x) : 0.0) + log1p);
}

// base^exponent rounded to fp32, for base >= 0 and exponent > 0.
MOESAIC_HOST_DEVICE inline float portable_pow(float base, float exponent) {
  if (!(base > 0)) return base != base ? base : 0.0F;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(static_cast<double>(base));
  // base = m 2^e with m in [2/3, 4/3).
  auto e = static_cast<std::int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL);
  if (m > 4.0 / 3) {
    m = m * 0.5;
    ++e;
  }
  const double log =
      static_cast<double>(e) * 0x1.62e42fefa39efp-1 + portable_log_ratio((m - 1.0) / (m + 1.0));
  return static_cast<float>(portable_exp_f64(static_cast<double>(exponent) * log));
}

}  // namespace moesaic
