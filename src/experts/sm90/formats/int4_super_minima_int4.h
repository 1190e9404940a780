// 4-bit integers in groups of 16 columns, with minima in w13 alone (Q2_K beside Q3_K).
#pragma once

#include "experts/sm90/formats/int4_super.h"
#include "experts/sm90/formats/int4_super_minima.h"

namespace moesaic::cuda {

struct Int4SuperMinimaInt4 : Int4SuperMinima {
  using OfW2 = Int4Super;
};

}  // namespace moesaic::cuda
