// One rank's configuration of an expert-parallel group.
#pragma once

#include "moesaic/parallel.h"

namespace moesaic::test {

inline ParallelConfig ep_config(int ep_size, int ep_rank,
                                ExpertPlacement placement = ExpertPlacement::kLinear) {
  ParallelConfig c;
  c.ep_size = ep_size;
  c.ep_rank = ep_rank;
  c.placement = placement;
  return c;
}

}  // namespace moesaic::test
