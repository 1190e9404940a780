// Options of ranks that would change nothing: refused by their names.
#pragma once

#include "rank_cli.h"

namespace moesaic::tool {

// Whatever the layer.
Status check_rank_effects(const RankOptions& options);
// Of this layer, on ranks that lie so.
Status check_rank_effects(const RankOptions& options, const ParallelConfig& parallel,
                          const MoeLayerSpec& spec);

}  // namespace moesaic::tool
