// How the three projections of a layer's experts lie in tensors. E experts, H hidden, I width.
// Source: docs/spec/checkpoints.md section 3.4.
#pragma once

#include <cstdint>

namespace moesaic {

enum class ExpertStorage : std::uint8_t {
  kPerExpert,           // per expert: gate [I, H], up [I, H], down [H, I]
  kPerExpertUpFirst,    // per expert: gate_and_up [2I, H] (up rows first), down [H, I]
  kStacked,             // gate [E, I, H], up [E, I, H], down [E, H, I]
  kFlat,                // gate, up and the transposed down, each [E * I, H]
  kFusedNT,             // gate_up [E, 2I, H] (gate rows first), down [E, H, I]
  kFusedNN,             // gate_up [E, H, 2I] (gate columns first), down [E, I, H]
  kMxfp4Interleaved,    // gate_up blocks [E, 2I, H/32, 16] (row 2j gate j, 2j + 1 up j) and scales
                        // [E, 2I, H/32], down likewise with H rows of I; U8
  kFusedNNInterleaved,  // gate_up [E, H, 2I] (column 2j gate j, 2j + 1 up j), down [E, I, H]
  kFusedNTInterleaved,  // gate_up [E, 2I, H] (row 2j gate j, row 2j + 1 up j), down [E, H, I]
};

}  // namespace moesaic
