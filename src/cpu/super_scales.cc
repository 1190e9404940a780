#include "cpu/super_scales.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/super_scales.h"

namespace moesaic::cpu {
namespace {

constexpr std::size_t kMostGroups = SuperScaleForm::kSteps / 16;

// The integers of four groups of one column into the three planes of their bytes.
void put_six(const std::int8_t* codes, std::byte* planes) {
  for (int j = 0; j < 3; ++j) {
    const auto last = static_cast<unsigned>(codes[3]) >> (2 * j) & 3U;
    planes[j * kPanelColumns] =
        static_cast<std::byte>((static_cast<unsigned>(codes[j]) & 63U) | last << 6);
  }
}

// One column of a super-block: a number and its planes, `at` that column's place in the number.
bool put_column(const SuperScaleForm& form, std::span<const float> values, std::byte* unit,
                std::byte* planes) {
  std::array<std::int8_t, kMostGroups> codes{};
  std::uint16_t number = 0;
  if (!quant::split_super_scales(values, form.bits, codes.data(), &number)) return false;
  std::memcpy(unit, &number, sizeof(number));
  const auto groups = static_cast<std::size_t>(form.groups());
  for (std::size_t g = 0; g < groups; g += 4) {
    if (form.bits == 6) {
      put_six(&codes[g], planes + static_cast<std::int64_t>(g) * 3 / 4 * kPanelColumns);
      continue;
    }
    for (std::size_t j = g; j < g + 4; ++j)
      planes[static_cast<std::int64_t>(j) * kPanelColumns] = static_cast<std::byte>(codes[j]);
  }
  return true;
}

}  // namespace

std::int64_t pack_super_scales(const PackedShape& shape, const SuperScaleForm& form,
                               const ConstTensorView& scale, const ConstTensorView& min,
                               std::byte* dst, int num_threads) {
  const std::int64_t across = ceil_div(shape.k, form.group);
  const std::int64_t real_blocks = ceil_div(shape.k, SuperScaleForm::kSteps);
  const std::int64_t panel_bytes = form.panel_bytes(shape.padded_k());
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first_bad = kNone;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(min : first_bad)
  for (std::int64_t p = 0; p < shape.num_panels(); ++p) {
    std::byte* panel = dst + p * panel_bytes;
    std::memset(panel, 0, static_cast<std::size_t>(panel_bytes));
    for (std::int64_t b = 0; b < real_blocks; ++b) {
      std::byte* block = panel + b * form.block_bytes();
      std::byte* planes = block + kPanelColumns * (form.minima ? 4 : 2);
      const std::int64_t count = std::min(form.groups(), across - b * form.groups());
      for (int c = 0; c < kPanelColumns; ++c) {
        const std::int64_t row = shape.source_row(p, c);
        if (row < 0) continue;
        const std::int64_t from = row * across + b * form.groups();
        std::array<float, kMostGroups> values{};
        const auto put = [&](const ConstTensorView& t, int which) {
          for (std::int64_t g = 0; g < count; ++g) {
            const std::int64_t at =
                MOESAIC_FAULT(cpu_super_scale_of_next_group) ? std::min(g + 1, count - 1) : g;
            values[static_cast<std::size_t>(g)] = load_as_f32(t.data, t.dtype, from + at);
          }
          return put_column(form, {values.data(), static_cast<std::size_t>(form.groups())},
                            block + 2 * (which * kPanelColumns + c),
                            planes + which * form.planes() * kPanelColumns + c);
        };
        const bool ok = put(scale, 0) && (!form.minima || put(min, 1));
        if (!ok) first_bad = std::min(first_bad, row * real_blocks + b);
      }
    }
  }
  return first_bad == kNone ? -1 : first_bad;
}

}  // namespace moesaic::cpu
