// Scales of weights quantised in rectangular blocks: their shape, and whether their values can be
// trusted.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// Rows and columns of a tile of FP8 weights, and columns of a row of activations, that share a
// scale in the block scheme.
inline constexpr std::int64_t kFp8BlockSize = 128;

// Weights [.., N, K] share one scale per n x k tile; the last tiles of a row or column may be
// ragged.
struct BlockShape {
  std::int64_t n = kFp8BlockSize;
  std::int64_t k = kFp8BlockSize;
  bool operator==(const BlockShape&) const = default;
};

// [.., ceil(N/n), ceil(K/k)] for a weight of rank 2 or 3. kInvalidShape for other ranks,
// kInvalidArgument for a block size < 1.
Result<Shape> block_scale_shape(const Shape& weight, BlockShape block);

// kInvalidShape: "w2_scale: got [8, 7, 14], need [8, 8, 14] for block 128x128 of [8, 1024, 1792]".
Status expect_block_scale_shape(std::string_view field, const ConstTensorView& scale,
                                const Shape& weight, BlockShape block);

// Refuses scales that would turn a layer into NaN or silently erase part of it: NaN, infinity, a
// negative number, or a zero over a tile whose weights are not all zero.
//   scale   [.., ceil(N/n), ceil(K/k)] F32, BF16 or F8_E8M0, contiguous
//   weight  [.., N, K] F8_E4M3, contiguous; read only under zero scales
// kInvalidArgument names the first bad index and its value; also the shape and dtype errors of
// both. O(number of scales).
Status validate_block_scales(std::string_view field, const ConstTensorView& scale,
                             const ConstTensorView& weight, BlockShape block);

}  // namespace moesaic::quant
