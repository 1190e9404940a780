// Shapes of the tile registers, in the form in which the processor loads them.
#pragma once

#include <cstdint>

namespace moesaic::cpu {

inline constexpr int kTileRegisters = 8;
inline constexpr int kTileRows = 16;   // at most
inline constexpr int kTileBytes = 64;  // of a row, at most

// The 64 bytes of LDTILECFG.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  constexpr void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<std::uint8_t>(num_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace moesaic::cpu
