// 4-bit integers without minima in w13 and with them in w2 (Q3_K beside Q4_K).
#pragma once

#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int4_super.h"

namespace moesaic::cuda {

struct Int4SuperInt4 : Int4Super {
  using OfW2 = Int4Minima;
};

}  // namespace moesaic::cuda
