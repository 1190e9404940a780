// As int4_int8.h with minima in w2 too (Q4_K beside Q5_K).
#pragma once

#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int8_minima.h"

namespace moesaic::cuda {

struct Int4Int8Minima : Int4Minima {
  using OfW2 = Int8Minima;
};

}  // namespace moesaic::cuda
