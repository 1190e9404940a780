#include "cpu/packed_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/available_memory.h"
#include "core/checked.h"
#include "core/fault.h"

#if defined(__linux__)
#include <sys/mman.h>
#else
#include <cstdlib>
#endif

namespace moesaic::cpu {
namespace {

// Byte offset of step `step` of column `column` inside a unit.
std::int64_t unit_offset(WeightKind kind, std::int64_t elem_bytes, int column, std::int64_t step) {
  const bool quads = (kind == WeightKind::kI8Quads || kind == WeightKind::kI4Quads ||
                      kind == WeightKind::kE2M1Quads) &&
                     !MOESAIC_FAULT(cpu_pack_quads_as_pairs);
  if (elem_bytes != 1 || quads) return column * 4 + step * elem_bytes;
  const std::int64_t quad = column / 4, in_quad = column % 4;
  return quad * 16 + (step / 2) * 8 + in_quad * 2 + step % 2;
}

constexpr std::int64_t kUnitBytes = 4 * kPanelColumns;

template <int kBytes>
void pack_panel(const PackedShape& shape, std::int64_t panel, const std::byte* matrix,
                std::byte* packed) {
  constexpr std::int64_t kSteps = 4 / kBytes;
  std::byte* base = packed + panel * shape.panel_bytes();
  std::memset(base, 0, static_cast<std::size_t>(shape.panel_bytes()));
  for (int column = 0; column < kPanelColumns; ++column) {
    const std::int64_t row = shape.source_row(panel, column);
    if (row < 0) continue;
    const std::byte* line = matrix + row * shape.k * kBytes;
    std::array<std::int64_t, 4> offset{};
    for (std::int64_t s = 0; s < kSteps; ++s)
      offset[static_cast<std::size_t>(s)] = unit_offset(shape.kind, kBytes, column, s);
    for (std::int64_t k = 0; k < shape.k; ++k) {
      std::byte* cell =
          base + k / kSteps * kUnitBytes + offset[static_cast<std::size_t>(k % kSteps)];
      std::memcpy(cell, line + k * kBytes, kBytes);
      if (kBytes == 1) *cell ^= static_cast<std::byte>(shape.code_flip);
    }
  }
}

// Nibbles: two per byte in the matrix, low one first.
int get_nibble(const std::byte* p, std::int64_t i) {
  return (static_cast<int>(p[i / 2]) >> (i % 2 * 4)) & 0xF;
}
void or_nibble(std::byte* p, std::int64_t i, int code) {
  p[i / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
}
// Nibble of a unit that holds step `step` of column `column`. kInt4Fp8 and the quads are decoded by
// bytes: their low nibbles lie as the bytes of steps 0..3 of an eight-bit format would, the high ones
// as those of 4..7.
std::int64_t unit_nibble(WeightKind kind, int column, std::int64_t step) {
  if (kind != WeightKind::kCode4) return unit_offset(kind, 1, column, step % 4) * 2 + step / 4;
  return column * 8 + step % 2 * 4 +
         (MOESAIC_FAULT(cpu_pack_nibbles_in_order) ? step / 4 : step / 2);
}

void pack_nibble_panel(const PackedShape& shape, std::int64_t panel, const std::byte* matrix,
                       std::byte* packed) {
  std::byte* base = packed + panel * shape.panel_bytes();
  std::memset(base, 0, static_cast<std::size_t>(shape.panel_bytes()));
  for (int column = 0; column < kPanelColumns; ++column) {
    const std::int64_t row = shape.source_row(panel, column);
    if (row < 0) continue;
    const std::byte* line = matrix + row * shape.k / 2;
    for (std::int64_t k = 0; k < shape.k; ++k) {
      std::byte* unit = base + k / 8 * kUnitBytes;
      const std::int64_t at = unit_nibble(shape.kind, column, k % 8);
      or_nibble(unit, at, get_nibble(line, k) ^ shape.code_flip);
    }
  }
}

// Six-bit codes: sixteen steps of a column are three words, the same one in each of three planes.
constexpr std::int64_t kSixSteps = 16;
using SixWords = std::array<std::uint32_t, 3>;

// kI6: a pair of steps has one in either half of a word: pairs 0 to 5 two a word at bits 0 and 6, of pairs
// 6 and 7 the low four bits above those of words 0 and 2, and the high two above those of word 1.
// kI6Quads: quads 0 to 2 have a word each, a step to a byte; above them two bits each of those of quad 3.
void or_six(WeightKind kind, int step, std::uint32_t code, SixWords& words) {
  if (kind == WeightKind::kI6Quads) {
    const int byte = step % 4 * 8, quad = step / 4;
    if (quad < 3) words[static_cast<std::size_t>(quad)] |= code << byte;
    if (quad < 3) return;
    for (int i = 0; i < 3; ++i) {
      const int from = MOESAIC_FAULT(cpu_pack_six_high_parts_reversed) ? 2 - i : i;
      words[static_cast<std::size_t>(i)] |= (code >> (2 * from) & 3U) << (byte + 6);
    }
    return;
  }
  const int half = (MOESAIC_FAULT(cpu_pack_six_halves_swapped) ? 1 - step % 2 : step % 2) * 16;
  const int pair = step / 2;
  if (pair < 6) {
    words[static_cast<std::size_t>(pair / 2)] |= code << (half + pair % 2 * 6);
    return;
  }
  const int high = MOESAIC_FAULT(cpu_pack_six_high_parts_reversed) ? 7 - pair : pair - 6;
  words[pair == 6 ? 0 : 2] |= (code & 15U) << (half + 12);
  words[1] |= code >> 4 << (half + 12 + 2 * high);
}

void pack_six_panel(const PackedShape& shape, std::int64_t panel, const std::byte* matrix,
                    std::byte* packed) {
  std::byte* base = packed + panel * shape.panel_bytes();
  std::memset(base, 0, static_cast<std::size_t>(shape.panel_bytes()));
  for (int column = 0; column < kPanelColumns; ++column) {
    const std::int64_t row = shape.source_row(panel, column);
    if (row < 0) continue;
    const std::byte* line = matrix + row * shape.k;
    for (std::int64_t k = 0; k < shape.k; k += kSixSteps) {
      SixWords words{};
      for (std::int64_t s = 0; s < kSixSteps && k + s < shape.k; ++s) {
        const auto code = std::to_integer<std::uint32_t>(line[k + s]) ^ shape.code_flip;
        or_six(shape.kind, static_cast<int>(s), code & 63U, words);
      }
      std::byte* unit = base + k / kSixSteps * 3 * kUnitBytes + column * 4;
      for (const std::uint32_t word : words) {
        std::memcpy(unit, &word, sizeof(word));
        unit += kUnitBytes;
      }
    }
  }
}

constexpr std::int64_t kMaxPackedBytes = std::int64_t{1} << 46;

}  // namespace

std::int64_t PackedShape::elem_bits() const {
  switch (kind) {
    case WeightKind::kF32:
      return 32;
    case WeightKind::kBF16:
    case WeightKind::kF16:
      return 16;
    case WeightKind::kE4M3:
    case WeightKind::kI8:
    case WeightKind::kI8Quads:
      return 8;
    case WeightKind::kI6:
    case WeightKind::kI6Quads:
      return 6;
    case WeightKind::kCode4:
    case WeightKind::kInt4Fp8:
    case WeightKind::kI4Quads:
    case WeightKind::kE2M1Quads:
      return 4;
  }
  return 32;
}
std::int64_t PackedShape::num_panels() const {
  return order == RowOrder::kGateUp ? ceil_div(rows / 2, kPanelColumns / 2)
                                    : ceil_div(rows, kPanelColumns);
}
std::int64_t PackedShape::bytes_of(std::int64_t steps) const {
  return steps * kPanelColumns * elem_bits() / 8;
}
std::int64_t PackedShape::num_groups() const { return ceil_div(padded_k(), kGroup); }
std::int64_t PackedShape::matrix_bytes() const { return num_panels() * panel_bytes(); }

std::int64_t PackedShape::source_row(std::int64_t panel, int column) const {
  if (order == RowOrder::kPlain) {
    const std::int64_t row = panel * kPanelColumns + column;
    return row < rows ? row : -1;
  }
  constexpr int kHalf = kPanelColumns / 2;
  const std::int64_t half_rows = rows / 2;
  const std::int64_t in_half = panel * kHalf + column % kHalf;
  if (in_half >= half_rows) return -1;
  bool up = column >= kHalf;
  if (MOESAIC_FAULT(cpu_pack_swaps_gate_up)) up = !up;
  return up ? half_rows + in_half : in_half;
}

Status check_packed_shape(const PackedShape& shape, std::int64_t num_matrices) {
  if (shape.order == RowOrder::kGateUp && shape.rows % 2 != 0) {
    return Status(StatusCode::kInvalidShape, "w13: got " + std::to_string(shape.rows) +
                                                 " rows, need an even number (gate and up)");
  }
  if (shape.rows < 0 || shape.k < 0 || num_matrices < 0 || shape.rows > kMaxPackedBytes ||
      shape.k > kMaxPackedBytes) {
    return Status(StatusCode::kLimitExceeded, "weights: a dimension exceeds 2^46");
  }
  const auto panel = checked_mul(shape.padded_k(), kPanelColumns * shape.elem_bits() / 8);
  const auto matrix = panel ? checked_mul(*panel, shape.num_panels()) : std::nullopt;
  const auto total = matrix ? checked_mul(*matrix, num_matrices) : std::nullopt;
  if (!total || *total > kMaxPackedBytes) {
    return Status(StatusCode::kLimitExceeded, "weights: " + std::to_string(num_matrices) +
                                                  " matrices of [" + std::to_string(shape.rows) +
                                                  ", " + std::to_string(shape.k) +
                                                  "] exceed 2^46 bytes");
  }
  return {};
}

void pack_matrix(const PackedShape& shape, const std::byte* src, std::byte* dst, int num_threads) {
  const std::int64_t panels = shape.num_panels();
  const std::int64_t bits = shape.elem_bits();
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (std::int64_t p = 0; p < panels; ++p) {
    if (bits == 4) pack_nibble_panel(shape, p, src, dst);
    if (bits == 6) pack_six_panel(shape, p, src, dst);
    if (bits == 8) pack_panel<1>(shape, p, src, dst);
    if (bits == 16) pack_panel<2>(shape, p, src, dst);
    if (bits == 32) pack_panel<4>(shape, p, src, dst);
  }
}

std::int64_t find_wide_code(const PackedShape& shape, const std::byte* src) {
  if (shape.elem_bits() != 6) return -1;
  const auto wide = [](std::byte code) {
    const auto value = static_cast<std::int8_t>(code);
    return value < std::int8_t{-32} || value > std::int8_t{31};
  };
  const std::byte* end = src + shape.rows * shape.k;
  const std::byte* found = std::find_if(src, end, wide);
  return found == end ? -1 : found - src;
}

void pack_block_scales(const PackedShape& shape, const float* scales, std::int64_t scale_cols,
                       float* dst) {
  constexpr int kStripColumns = 16, kStrips = kPanelColumns / kStripColumns;
  const std::int64_t half_rows = shape.order == RowOrder::kGateUp ? shape.rows / 2 : shape.rows;
  for (std::int64_t p = 0; p < shape.num_panels(); ++p) {
    for (std::int64_t g = 0; g < shape.num_groups(); ++g) {
      for (int s = 0; s < kStrips; ++s) {
        const std::int64_t row = shape.source_row(p, s * kStripColumns);
        std::int64_t block =
            row < 0 ? 0 : row / half_rows * ceil_div(half_rows, kGroup) + row % half_rows / kGroup;
        if (MOESAIC_FAULT(cpu_scale_row_of_next_block) && row >= 0)
          block = (block + 1) % ceil_div(shape.rows, kGroup);
        *dst++ = row < 0 ? 0.0F : scales[block * scale_cols + g];
      }
    }
  }
}

#if defined(__linux__)
void WeightFree::operator()(std::byte* p) const { munmap(p, static_cast<std::size_t>(bytes)); }

Result<WeightBuffer> WeightBuffer::allocate(std::int64_t bytes) {
  WeightBuffer buffer;
  buffer.bytes_ = bytes;
  if (bytes == 0) return buffer;
  MOESAIC_RETURN_IF_ERROR(check_available_memory("weights", bytes));
  void* p = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    return Status(StatusCode::kOutOfMemory,
                  "cannot allocate " + std::to_string(bytes) + " bytes for weights");
  }
  // Streaming gigabytes through 4 KiB pages spends a noticeable share of the time in page walks.
  madvise(p, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  buffer.data_ =
      std::unique_ptr<std::byte[], WeightFree>(static_cast<std::byte*>(p), WeightFree{bytes});
  return buffer;
}
#else
void WeightFree::operator()(std::byte* p) const { std::free(p); }

Result<WeightBuffer> WeightBuffer::allocate(std::int64_t bytes) {
  WeightBuffer buffer;
  buffer.bytes_ = bytes;
  if (bytes == 0) return buffer;
  MOESAIC_RETURN_IF_ERROR(check_available_memory("weights", bytes));
  auto* p = static_cast<std::byte*>(
      std::aligned_alloc(64, static_cast<std::size_t>(round_up(bytes, 64))));
  if (p == nullptr) {
    return Status(StatusCode::kOutOfMemory,
                  "cannot allocate " + std::to_string(bytes) + " bytes for weights");
  }
  buffer.data_ = std::unique_ptr<std::byte[], WeightFree>(p, WeightFree{bytes});
  return buffer;
}
#endif

}  // namespace moesaic::cpu
