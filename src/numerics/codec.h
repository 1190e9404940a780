// Scalar codecs of every number format, the truth that faster code is tested against. This header
// gathers them:
//   float_codec.h  bf16, f16, e4m3, e5m2, e2m1 and the fnuz pair
//   e8m0.h         power-of-two scales and the three rules that choose them
//   integer.h      int8, int4/uint4 nibbles, nf4
//   element.h      load_as_f32 / store_from_f32: one element of any floating dtype
#pragma once

#include "numerics/e8m0.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "numerics/integer.h"
