// The work list of the grouped GEMMs from topk_ids, on the device: rows of each local expert in
// (token, slot) order and the token groups they are processed in. A function of the ids alone.
#pragma once

#include <cstdint>

#include "cuda/device_traits.h"
#include "cuda/quant_rows.h"
#include "permute/sm90/some_rows.h"

namespace moesaic::cuda {

// One token group of one expert, or a pair of groups when two CTAs share weights.
struct GroupRecord {
  std::int32_t expert;
  std::int32_t first_row;    // of the expert, in the order of pair_of_row
  std::int32_t rows;         // of the expert
  std::int32_t first_group;  // index of the expert's first record
};

// Of rows that are not there (`rows`) nothing is read, and row_of_pair is not written. A list of more
// than `capacity` rows is not made: there are no groups then, and no pair has a row.
struct AlignParams {
  const std::int32_t* topk_ids = nullptr;    // [pairs]; -1: no expert
  const float* topk_weights = nullptr;       // [pairs]
  const std::int32_t* expert_map = nullptr;  // [num_experts] global -> local or -1; null: identity
  std::int32_t pairs = 0;
  SomeRows rows;                 // more than kComparedPairs pairs: those of rows that are there
  std::int32_t num_experts = 0;  // ids outside [0, num_experts) are dropped
  std::int32_t num_local_experts = 0;  // at most kMaxAlignedExperts
  std::int32_t rows_per_record = 0;    // tokens of a group (or pair of groups)
  std::int32_t max_groups = 0;
  // With a capacity [2, capacity] and [capacity]: pair_of_row also has the numbers 0, 1, 2 .. of rows.
  std::int32_t* pair_of_row = nullptr;  // [pairs] out
  float* weight_of_row = nullptr;       // [pairs] out
  std::int32_t* row_of_pair = nullptr;  // [pairs] out; -1: dropped
  GroupRecord* groups = nullptr;        // [max_groups] out
  std::uint32_t* group_done = nullptr;  // [max_groups] zeroed
  std::uint32_t* next_item = nullptr;   // zeroed
  std::uint32_t* num_groups = nullptr;  // out; with a capacity the rows behind it
  std::uint32_t* band_done = nullptr;   // [bands] zeroed
  std::int32_t bands = 0;
  // Set by launch_align: blocks that share the pairs, groups of so many blocks, how often each warp
  // takes 32 pairs, and how many groups share the warps of a step.
  std::int32_t blocks = 1, parts = 1, steps = 1, shares = 1;
  // Rows that the list may have; 0: as many as pairs. Of more than kComparedPairs pairs.
  std::int32_t capacity = 0;
};

// One block up to here, a thread per pair; above, clusters of blocks.
inline constexpr int kOneBlockPairs = 1024;

inline constexpr int kMaxAlignedExperts = 1024;

// Up to so many pairs one block lists by comparing all with all (align_compared.cuh), a thread
// each.
inline constexpr int kComparedPairs = 256;

// Groups that any routing of `pairs` pairs can produce.
constexpr std::int64_t max_group_records(std::int64_t pairs, std::int64_t local_experts,
                                         std::int64_t rows_per_record) {
  const std::int64_t touched = pairs < local_experts ? pairs : local_experts;
  return touched + pairs / rows_per_record;
}

// With `quant` also what launch_quant_rows does, in further blocks of the one kernel. Returns a
// cudaError_t value.
int launch_align(const AlignParams& params, const QuantRowsParams* quant,
                 const DeviceTraits& device, void* stream);

}  // namespace moesaic::cuda
