// Tier "avx512_bf16": AVX-512 with VBMI, VNNI and the bf16 dot product.
#define MOESAIC_TIER avx512_bf16
#define MOESAIC_TIER_TARGET HWY_AVX3_DL
#include "cpu/tier-inl.h"
