// Which rows and band an item of the grouped-GEMM kernel (grouped_gemm.cuh) is.
#pragma once

#include <cstdint>

#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// Whether GEMM2's items are slabs.
template <class Format, class Tile>
__device__ __forceinline__ bool takes_slabs(const GroupedParams& p, std::uint32_t num_groups) {
  return Layout<Format, Tile>::kSlabItems &&
         2 * num_groups * static_cast<std::uint32_t>(p.bands2) <= gridDim.x;
}

// Of an item of GEMM2.
__device__ __forceinline__ bool is_slab(const Item& item) { return item.band >= kOneSlab; }
template <bool kSlabItems>
__device__ __forceinline__ int band_of_w2(const GroupedParams& p, const Item& item) {
  const int band = item.band - p.bands1;
  return kSlabItems && is_slab(item) ? (band - kOneSlab) >> 1 : band;
}

// Narrow builds split an expert's rows evenly, in multiples of eight, over the fewest groups that
// fit; wide ones fill them when there are more than two.
template <class Tile>
__device__ __forceinline__ Item decode_item(const GroupedParams& p, const GroupRecord* groups,
                                            std::uint32_t index, std::uint32_t items1,
                                            std::uint32_t cta, bool slabs) {
  const bool second = index >= items1;
  if (second) index -= items1;
  const std::uint32_t bands = static_cast<std::uint32_t>(!second ? p.bands1
                                                         : slabs ? p.slabs2
                                                                 : p.bands2);
  const std::int32_t before = !second ? 0 : p.bands1 + (slabs ? kOneSlab : 0);
  const GroupRecord record = groups[index / bands];
  if constexpr (Tile::kMaxColumns <= kListColumns && !Tile::kPaired) {
    // Most records have one group, and divisions are slow.
    if (record.rows <= Tile::kMaxColumns) {
      const std::uint32_t band = index - bands * static_cast<std::uint32_t>(record.first_group);
      return {static_cast<std::int32_t>(band) + before, record.expert, record.first_row,
              record.rows, record.first_group};
    }
  }
  constexpr int kPerRecord = Tile::kMaxColumns * (Tile::kPaired ? 2 : 1);
  const std::uint32_t count =
      static_cast<std::uint32_t>((record.rows + kPerRecord - 1) / kPerRecord);
  // Groups of one band are neighbours in the list, so that later ones find its weights in L2.
  const std::uint32_t local = index - bands * static_cast<std::uint32_t>(record.first_group);
  const std::uint32_t band = local / count;
  const std::uint32_t group = local - band * count;
  Item item;
  item.band = static_cast<std::int32_t>(band) + before;
  item.expert = record.expert;
  item.group = record.first_group + static_cast<std::int32_t>(group);
  int begin = 0, rows = 0;
  if (Tile::kPaired) {
    // Two CTAs share a record. An even split over all of them: a small rest would cost two CTAs a
    // whole pass over the weights.
    const int parts = 2 * static_cast<int>(count);
    const int size = ((record.rows + parts - 1) / parts + 7) / 8 * 8;
    begin = min(size * (2 * static_cast<int>(group) + static_cast<int>(cta)), record.rows);
    rows = min(size, record.rows - begin);
  } else if (Tile::kMaxColumns > kRowsOrientation && Tile::kMaxColumns <= 128 && count > 2) {
    // Full groups and a remainder: full ones take the faster orientation.
    begin = static_cast<int>(group) * Tile::kMaxColumns;
    rows = min(Tile::kMaxColumns, record.rows - begin);
  } else {
    const int groups = static_cast<int>(count);
    const int size = ((record.rows + groups - 1) / groups + 7) / 8 * 8;
    begin = min(size * static_cast<int>(group), record.rows);
    rows = min(size, record.rows - begin);
  }
  item.first_row = record.first_row + begin;
  item.rows = rows;
  return item;
}

}  // namespace moesaic::cuda
