// 4-bit integers with minima in w13 and 6-bit integers in w2, both in narrow groups (Q4_K beside Q5_0).
#pragma once

#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int6_narrow.h"

namespace moesaic::cuda {

struct Int4Int6 : Int4Minima {
  using OfW2 = Int6Narrow;
};

}  // namespace moesaic::cuda
