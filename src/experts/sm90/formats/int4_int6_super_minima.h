// As int4_int6_super.h with minima in w2 too (Q4_K beside Q5_K).
#pragma once

#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int6_super_minima.h"

namespace moesaic::cuda {

struct Int4Int6SuperMinima : Int4Minima {
  using OfW2 = Int6SuperMinima;
};

}  // namespace moesaic::cuda
