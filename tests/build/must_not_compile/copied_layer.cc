// A layer owns its weights and workspace; there is one.
// EXPECT: deleted|implicitly-deleted|implicitly-declared
#include <utility>

#include "moesaic/fused_moe.h"

moesaic::FusedMoE caller(moesaic::FusedMoE& layer) {
#ifdef CONTROL
  return std::move(layer);
#else
  return moesaic::FusedMoE(layer);
#endif
}
