// 6-bit integers with minima in w13 and without in w2 (Q5_K beside Q6_K).
#pragma once

#include "experts/sm90/formats/int6_super.h"
#include "experts/sm90/formats/int6_super_minima.h"

namespace moesaic::cuda {

struct Int6Int6Super : Int6SuperMinima {
  using OfW2 = Int6Super;
};

}  // namespace moesaic::cuda
