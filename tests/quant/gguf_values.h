// Rows of GGUF blocks as plain numbers, for comparison with other readings of the same bytes.
#pragma once

#include <cstdint>

#include "quant/gguf_blocks.h"

namespace moesaic::test {

// [rows, columns] F32: scale * code - min of what split_gguf says, rounded once.
inline Result<Tensor> gguf_values(quant::GgufType type, const ConstTensorView& blocks,
                                  std::int64_t columns) {
  const quant::GgufTypeInfo& info = *quant::gguf_type_info(static_cast<std::uint32_t>(type));
  const Shape shape{blocks.dim(0), columns};
  const Shape grid{blocks.dim(0), info.group > 0 ? columns / info.group : 0};
  MOESAIC_ASSIGN_OR_RETURN(Tensor codes, Tensor::zeros(DType::kI8, shape));
  MOESAIC_ASSIGN_OR_RETURN(Tensor scale, Tensor::zeros(DType::kF32, grid));
  MOESAIC_ASSIGN_OR_RETURN(Tensor min, Tensor::zeros(DType::kF32, grid));
  MOESAIC_RETURN_IF_ERROR(quant::split_gguf(type, blocks, codes.view(), scale.view(),
                                            info.has_min ? min.view() : TensorView()));
  MOESAIC_ASSIGN_OR_RETURN(Tensor out, Tensor::zeros(DType::kF32, shape));
  for (std::int64_t i = 0; i < blocks.dim(0) * columns; ++i) {
    const std::int64_t g = i / info.group;
    out.as<float>()[i] =
        scale.as<float>()[g] * static_cast<float>(codes.as<std::int8_t>()[i]) - min.as<float>()[g];
  }
  return out;
}

}  // namespace moesaic::test
