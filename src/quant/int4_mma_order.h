// int4 weights in the order of the register operand of a 64 x 32 FP8 warpgroup MMA (Hopper): each
// thread's sixteen codes lie together in two words, so that one 64-bit load feeds one instruction.
// Private to kernels that choose it; invertible. Source: register fragment of wgmma m64nNk32, PTX
// ISA, with weights as the A operand.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

inline constexpr std::int64_t kMmaRows = 64;
inline constexpr std::int64_t kMmaCols = 32;
inline constexpr std::int64_t kMmaThreads = 128;

// Which element of a 64 x 32 tile is value i (0 .. 15) of thread t (0 .. 127): rows r and r + 8
// with r = 16 (t / 32) + t % 32 / 4, columns 4 (t % 4) .. + 3, then the same 16 columns further.
struct MmaElement {
  std::int64_t row, col;
};
constexpr MmaElement mma_element(std::int64_t t, std::int64_t i) {
  return {t / 32 * 16 + t % 32 / 4 + i / 4 % 2 * 8, t % 4 * 4 + i % 4 + i / 8 * 16};
}

// nibbles [N, K/2] U8, even column low, any 4-bit code <-> words I32 [N/64, K/32, 128, 2]: value i
// of a thread in bits 4 (i % 8) of word i / 8. kInvalidShape unless N % 64 == 0 and K % 32 == 0;
// also dtypes, layout, aliasing. Each undoes the other. Codes are not changed: unified_encode
// (int4_fp8.h) works on words before or after.
Status pack_int4_mma(ConstTensorView nibbles, TensorView words);
Status unpack_int4_mma(ConstTensorView words, TensorView nibbles);

}  // namespace moesaic
