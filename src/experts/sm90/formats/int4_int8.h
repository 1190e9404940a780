// 4-bit integers with minima in w13 and 8-bit integers in w2, both in narrow groups (Q4_K beside Q8_0).
#pragma once

#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int8_narrow.h"

namespace moesaic::cuda {

struct Int4Int8 : Int4Minima {
  using OfW2 = Int8Narrow;
};

}  // namespace moesaic::cuda
