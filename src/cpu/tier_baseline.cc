// Tier "baseline": the instructions that the whole library may use.
#define MOESAIC_TIER baseline
#define MOESAIC_TIER_TARGET 0
#include "cpu/tier-inl.h"
