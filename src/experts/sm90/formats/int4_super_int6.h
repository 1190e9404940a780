// As int4_super_int4.h with 6-bit integers in w2 (Q3_K beside Q5_K).
#pragma once

#include "experts/sm90/formats/int4_super.h"
#include "experts/sm90/formats/int6_super_minima.h"

namespace moesaic::cuda {

struct Int4SuperInt6 : Int4Super {
  using OfW2 = Int6SuperMinima;
};

}  // namespace moesaic::cuda
