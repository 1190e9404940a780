#include "checkpoint/reader/value_checks.h"

#include <fmt/format.h>

#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// Branch-free over a row, so that the compiler can vectorise: these checks read every weight.
template <class Bad>
Status check_bytes(const Place& place, const std::uint8_t* bytes, std::int64_t rows,
                   std::int64_t cols, const Bad& bad, std::string_view what,
                   std::string_view need) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::uint8_t* row = bytes + r * cols;
    unsigned found = 0;
    for (std::int64_t c = 0; c < cols; ++c) found |= bad(row[c]) ? 1U : 0U;
    if (found == 0) continue;
    std::int64_t c = 0;
    while (!bad(row[c])) ++c;
    return {StatusCode::kCorruptFile,
            fmt::format("{}: got the {} 0x{:02X} at [{}, {}], need {}", quote_name(place.name),
                        what, row[c], place.row(r), place.first_col + c, need)};
  }
  return {};
}

}  // namespace

Status check_e4m3_codes(const Place& place, const std::uint8_t* codes, std::int64_t rows,
                        std::int64_t cols) {
  return check_bytes(
      place, codes, rows, cols, [](std::uint8_t b) { return (b & 0x7F) == 0x7F; }, "NaN code",
      "finite e4m3 values");
}

Status check_e8m0_scales(const Place& place, const std::uint8_t* scales, std::int64_t rows,
                         std::int64_t cols) {
  if (MOESAIC_FAULT(checkpoint_accept_nan_exponents)) return {};
  return check_bytes(
      place, scales, rows, cols, [](std::uint8_t b) { return b == 0xFF; }, "NaN scale",
      "a power of two");
}

Status bad_scale(const Place& place, float scale, std::int64_t row, std::int64_t col,
                 ScaleSigns signs) {
  return {StatusCode::kCorruptFile,
          fmt::format("{}: got scale {} at [{}, {}], need a finite number{} (0 only over weights "
                      "that are all zero)",
                      quote_name(place.name), scale, place.row(row), place.first_col + col,
                      signs == ScaleSigns::kPositive ? " > 0" : "")};
}

}  // namespace moesaic::checkpoint
