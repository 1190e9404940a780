// The work list of the grouped GEMMs in the batched format, on the device: the first rows of each
// expert's slab, and the groups in which they are processed. A function of the counts alone, which
// the host never sees.
#pragma once

#include <cstdint>

#include "cuda/device_traits.h"
#include "cuda/quant_rows.h"
#include "permute/sm90/align.h"

namespace moesaic::cuda {

// A row of the slabs is a pair: row i of expert e is pair e * slab_rows + i.
struct BatchedListParams {
  // [experts] rows of each slab that count: below 0 none, above slab_rows all.
  const std::int32_t* counts = nullptr;
  std::int32_t experts = 0;             // 1 to kMaxAlignedExperts
  std::int32_t slab_rows = 0;           // T; experts * slab_rows at most 2^30
  std::int32_t rows_per_record = 0;     // as AlignParams
  std::int32_t* pair_of_row = nullptr;  // [experts * slab_rows] out, as far as there are rows
  GroupRecord* groups = nullptr;        // out: max_group_records(experts * slab_rows, ...) at most
  std::uint32_t* group_done = nullptr;  // zeroed, a word per group
  std::uint32_t* next_item = nullptr;   // zeroed
  std::uint32_t* num_groups = nullptr;  // out
  std::uint32_t* num_rows = nullptr;    // out, or null
  std::uint32_t* band_done = nullptr;   // [bands] zeroed ...
  std::int32_t bands = 0;
  bool zero_rows = false;  // ... and behind them a word per row
};

// With `quant` also the operand rows of all rows that count, from slabs [experts * slab_rows,
// columns] to the same places: what launch_quant_rows makes of them, its `tokens` and the experts
// of its static scales being those of the list. Other rows are neither read nor written. Capturable.
// Returns a cudaError_t value.
int launch_batched_list(const BatchedListParams& params, const QuantRowsParams* quant,
                        const DeviceTraits& device, void* stream);

}  // namespace moesaic::cuda
