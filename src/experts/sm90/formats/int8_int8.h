// 8-bit integers with minima in w13 and without in w2, in narrow groups (Q5_K beside Q6_K).
#pragma once

#include "experts/sm90/formats/int8_minima.h"
#include "experts/sm90/formats/int8_narrow.h"

namespace moesaic::cuda {

struct Int8Int8 : Int8Minima {
  using OfW2 = Int8Narrow;
};

}  // namespace moesaic::cuda
