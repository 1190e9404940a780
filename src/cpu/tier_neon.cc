// Tier "neon": 64-bit ARM with NEON; the 8-bit dot product (I8MM) where the machine has it.
#define MOESAIC_TIER neon
#define MOESAIC_TIER_TARGET HWY_NEON
#define MOESAIC_TIER_NEON 1
#include "cpu/tier-inl.h"
