// The tile instructions (AMX_TILE, AMX_BF16, AMX_INT8), as the policy that panel_gemm_tiles-inl.h
// and ceilings_tiles-inl.h are templates of. (Inline assembly: the compilers' own forms take tile
// numbers that are no template arguments, and g++'s do not tell that they touch memory.)
#if defined(MOESAIC_CPU_TILES_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOESAIC_CPU_TILES_AMX_INL_H_
#undef MOESAIC_CPU_TILES_AMX_INL_H_
#else
#define MOESAIC_CPU_TILES_AMX_INL_H_
#endif

#include "cpu/simd-inl.h"
#include "cpu/tile_config.h"

#if MOESAIC_TIER_BF16
MOESAIC_BEFORE_NAMESPACE();
namespace moesaic::cpu::HWY_NAMESPACE {
namespace {

struct TilesAmx {
  static HWY_INLINE void Configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  // All tiles are as they were at the start of the thread, which need not be saved.
  static HWY_INLINE void Release() { __asm__ volatile("tilerelease" : : : "memory"); }
  template <int T>
  static HWY_INLINE void Zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  // Rows of the tile's shape, `stride` bytes apart.
  template <int T>
  static HWY_INLINE void Load(const void* base, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static HWY_INLINE void Store(void* base, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(base), "r"(stride), "i"(T)
                     : "memory");
  }
  // C += A * B of pairs of bf16.
  template <int C, int A, int B>
  static HWY_INLINE void DotBF16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  // C += A * B of quads of bytes, those of A signed, those of B unsigned.
  template <int C, int A, int B>
  static HWY_INLINE void DotI8() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

}  // namespace
}  // namespace moesaic::cpu::HWY_NAMESPACE
MOESAIC_AFTER_NAMESPACE();
#endif  // MOESAIC_TIER_BF16

#endif  // per-target include guard
