// Tier "avx2": AVX2, FMA and F16C.
#define MOESAIC_TIER avx2
#define MOESAIC_TIER_TARGET HWY_AVX2
#include "cpu/tier-inl.h"
