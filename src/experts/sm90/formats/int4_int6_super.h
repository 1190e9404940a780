// As int4_int6.h with the scales of int6_super.h in w2 (Q4_K beside Q6_K).
#pragma once

#include "experts/sm90/formats/int4_minima.h"
#include "experts/sm90/formats/int6_super.h"

namespace moesaic::cuda {

struct Int4Int6Super : Int4Minima {
  using OfW2 = Int6Super;
};

}  // namespace moesaic::cuda
