// The integer kernels of tier "avx2" where the machine has no AVX-VNNI: on sums of byte pairs.
#define MOESAIC_TIER avx2_pairs
#define MOESAIC_TIER_TARGET HWY_AVX2
#define MOESAIC_TIER_BYTE_PAIRS 1
#include "cpu/tier-inl.h"
