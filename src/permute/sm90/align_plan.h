// The grid of launch_align: how blocks share the pairs and the rows to quantise. Host code, tested
// without a device.
#pragma once

#include <cstdint>

#include "cuda/device_traits.h"

namespace moesaic::cuda {

inline constexpr int kAlignThreads = 1024;
inline constexpr int kAlignClusterBlocks = 8;  // of a cluster
inline constexpr int kAlignHeld = 8;           // steps whose ids a warp requests at once
// Groups of 128 columns that a block quantises at once, sixteen threads each.
inline constexpr int kAlignGroupThreads = 16;
inline constexpr int kAlignBlockGroups = kAlignThreads / kAlignGroupThreads;

struct AlignGrid {
  // As AlignParams has them: blocks * parts blocks place pairs.
  std::int32_t blocks = 1, parts = 1, steps = 1, shares = 1;
  std::int32_t quantizing = 0;  // further blocks, a multiple of `blocks`, which only quantise
  std::uint32_t alone = 0;      // groups that they quantise; the rest is for all blocks
};

// For `pairs` >= 1 pairs and `groups` groups of 128 columns to quantise, of all rows together.
AlignGrid plan_align(std::int32_t pairs, std::int64_t groups, const DeviceTraits& device = {});

}  // namespace moesaic::cuda
