// int4 codes in the register order of a warpgroup MMA.

#include <string>

#include "core/fault.h"
#include "moesaic/interop/layouts.h"
#include "numerics/integer.h"
#include "quant/arguments.h"

namespace moesaic {
namespace {

Status check_mma_order(const ConstTensorView& nibbles, const ConstTensorView& words,
                       bool to_words) {
  MOESAIC_RETURN_IF_ERROR(quant::expect_matrix("nibbles", nibbles));
  const std::int64_t n = nibbles.dim(0);
  const std::int64_t half_k = nibbles.dim(1);
  if (n % kInt4MmaRows != 0 || half_k % (kInt4MmaCols / 2) != 0) {
    return Status(StatusCode::kInvalidShape,
                  "nibbles: got " + nibbles.shape.to_string() +
                      ", need [N, K/2] with N a multiple of 64 and K of 32");
  }
  return quant::check_arguments({
      {"nibbles", nibbles, quant::accept(DType::kU8), nibbles.shape, !to_words},
      {"words",
       words,
       quant::accept(DType::kI32, DType::kU32),
       {n / kInt4MmaRows, half_k / (kInt4MmaCols / 2), kInt4MmaThreads, 2},
       to_words},
  });
}

// Calls visit(word index, bit, nibble index of [N, K]) for every code.
template <class Visit>
void for_codes(std::int64_t n, std::int64_t k, Visit&& visit) {
  const std::int64_t k_tiles = k / kInt4MmaCols;
  for (std::int64_t tile = 0; k_tiles > 0 && tile < n / kInt4MmaRows * k_tiles; ++tile) {
    for (std::int64_t t = 0; t < kInt4MmaThreads; ++t) {
      for (std::int64_t i = 0; i < 16; ++i) {
        Int4MmaElement at = int4_mma_element(t, i);
        if (MOESAIC_FAULT(quant_mma_rows_swapped)) at.row ^= 8;
        const std::int64_t row = tile / k_tiles * kInt4MmaRows + at.row;
        const std::int64_t col = tile % k_tiles * kInt4MmaCols + at.col;
        visit((tile * kInt4MmaThreads + t) * 2 + i / 8, 4 * (i % 8), row * k + col);
      }
    }
  }
}

}  // namespace

Status pack_int4_mma(ConstTensorView nibbles, TensorView words) {
  MOESAIC_RETURN_IF_ERROR(check_mma_order(nibbles, words, true));
  auto* out = words.as<std::uint32_t>();
  for_codes(nibbles.dim(0), 2 * nibbles.dim(1),
            [&](std::int64_t word, std::int64_t bit, std::int64_t from) {
              if (bit == 0) out[word] = 0;  // the first of a word's codes
              const std::uint32_t code = nibble_at(nibbles.as<std::uint8_t>(), from);
              out[word] |= code << bit;
            });
  return {};
}

Status unpack_int4_mma(ConstTensorView words, TensorView nibbles) {
  MOESAIC_RETURN_IF_ERROR(check_mma_order(nibbles, words, false));
  for_codes(nibbles.dim(0), 2 * nibbles.dim(1),
            [&](std::int64_t word, std::int64_t bit, std::int64_t to) {
              const std::uint32_t code = words.as<std::uint32_t>()[word] >> bit & 15U;
              set_nibble(nibbles.as<std::uint8_t>(), to, static_cast<std::uint8_t>(code));
            });
  return {};
}

}  // namespace moesaic
