// Tier "avx512": AVX-512 F, VL, DQ and BW.
#define MOESAIC_TIER avx512
#define MOESAIC_TIER_TARGET HWY_AVX3
#include "cpu/tier-inl.h"
