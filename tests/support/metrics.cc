#include "support/metrics.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/half.h"

namespace moesaic::test {
namespace {

double load(const ConstTensorView& t, std::int64_t i) {
  switch (t.dtype) {
    case DType::kF64:
      return t.as<double>()[i];
    case DType::kF32:
      return static_cast<double>(t.as<float>()[i]);
    case DType::kI32:
      return static_cast<double>(t.as<std::int32_t>()[i]);
    case DType::kI64:
      return static_cast<double>(t.as<std::int64_t>()[i]);
    case DType::kU8:
      return static_cast<double>(t.as<std::uint8_t>()[i]);
    case DType::kF16:
      return half_value(t.as<std::uint16_t>()[i]);
    case DType::kBF16: {
      const std::uint32_t bits = static_cast<std::uint32_t>(t.as<std::uint16_t>()[i]) << 16;
      float f = 0;
      std::memcpy(&f, &bits, 4);
      return static_cast<double>(f);
    }
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

}  // namespace

std::vector<double> to_doubles(ConstTensorView t) {
  std::vector<double> out(static_cast<std::size_t>(t.shape.num_elements().value()));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = load(t, static_cast<std::int64_t>(i));
  return out;
}

Comparison compare(std::span<const double> got, std::span<const double> want) {
  Comparison c;
  c.rel_l2 = std::numeric_limits<double>::infinity();
  if (got.size() != want.size()) {
    c.describe = fmt::format("sizes differ: got {}, want {}", got.size(), want.size());
    return c;
  }
  double err2 = 0, want2 = 0, got2 = 0, dot = 0;
  std::size_t worst = 0, non_finite = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) {
      if (non_finite++ == 0) worst = i;
      continue;
    }
    const double d = got[i] - want[i];
    err2 += d * d;
    want2 += want[i] * want[i];
    got2 += got[i] * got[i];
    dot += got[i] * want[i];
    if (std::abs(d) > c.max_abs && non_finite == 0) {
      c.max_abs = std::abs(d);
      worst = i;
    }
  }
  if (non_finite > 0) {
    c.describe = fmt::format("{} non-finite values, first at {}", non_finite, worst);
    return c;
  }
  if (want2 == 0) {
    c.describe = "the reference is all zero: nothing is tested";
    return c;
  }
  c.rel_l2 = std::sqrt(err2 / want2);
  c.cosine = got2 > 0 ? dot / std::sqrt(got2 * want2) : 0;
  c.describe = fmt::format("rel_l2 {:.3e}, worst at {}: got {} want {}{}", c.rel_l2, worst,
                           got.empty() ? 0 : got[worst], want.empty() ? 0 : want[worst],
                           got2 == 0 ? " (got is all zero)" : "");
  return c;
}

bool same_bits(ConstTensorView got, ConstTensorView want, std::string* why) {
  if (got.dtype != want.dtype || !(got.shape == want.shape)) {
    *why = fmt::format("got {} {}, want {} {}", dtype_name(got.dtype), got.shape.to_string(),
                       dtype_name(want.dtype), want.shape.to_string());
    return false;
  }
  const std::int64_t n = got.shape.num_elements().value();
  const std::int64_t width = dtype_bits(got.dtype) / 8;
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::memcmp(got.data + i * width, want.data + i * width, static_cast<std::size_t>(width)) !=
        0) {
      *why = fmt::format("first difference at element {}: got {} want {}", i, load(got, i),
                         load(want, i));
      return false;
    }
  }
  return true;
}

}  // namespace moesaic::test
