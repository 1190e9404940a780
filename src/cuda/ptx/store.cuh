// Stores to global memory under a condition, as instructions with a predicate: of an if around them,
// what is stored belongs to the branch, and a loop of such branches is computed one by one.
#pragma once

#include <cstdint>

namespace moesaic::ptx {

__device__ __forceinline__ void store_if(bool condition, void* to, std::uint16_t v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.u16 [%0], %1;\n}\n" ::"l"(to),
               "h"(v), "r"(static_cast<int>(condition))
               : "memory");
}
__device__ __forceinline__ void store_if(bool condition, void* to, std::uint32_t v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.u32 [%0], %1;\n}\n" ::"l"(to),
               "r"(v), "r"(static_cast<int>(condition))
               : "memory");
}
// kStreams: rows of many tokens, of which L2 does not hold what is read again at once.
template <bool kStreams = false>
__device__ __forceinline__ void store_if(bool condition, void* to, const uint2& v) {
  if constexpr (kStreams) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.cs.v2.u32 [%0], {%1, %2};\n}\n" ::
            "l"(to),
        "r"(v.x), "r"(v.y), "r"(static_cast<int>(condition))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}\n" ::"l"(
            to),
        "r"(v.x), "r"(v.y), "r"(static_cast<int>(condition))
        : "memory");
  }
}
template <bool kStreams = false>
__device__ __forceinline__ void store_if(bool condition, void* to, const uint4& v) {
  if constexpr (kStreams) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.cs.v4.u32 [%0], {%1, %2, %3, "
        "%4};\n}\n" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(condition))
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, "
        "%4};\n}\n" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(condition))
        : "memory");
  }
}

}  // namespace moesaic::ptx
