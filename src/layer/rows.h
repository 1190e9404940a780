// Views that the layer's engines make of their buffers and of a call's rows.
#pragma once

#include <cstdint>

#include "moesaic/tensor.h"

namespace moesaic::layer {

inline TensorView view_of(void* data, DType dtype, const Shape& shape) {
  return {static_cast<std::byte*>(data), dtype, shape};
}
inline ConstTensorView view_of(const void* data, DType dtype, const Shape& shape) {
  return {static_cast<const std::byte*>(data), dtype, shape};
}

// Rows [first, first + count) of a matrix whose rows may be apart.
template <class Byte>
BasicTensorView<Byte> rows_of(const BasicTensorView<Byte>& t, std::int64_t first,
                              std::int64_t count) {
  BasicTensorView<Byte> part = t;
  if (t.present()) part.data += first * t.strides[0] * (dtype_bits(t.dtype) / 8);
  part.shape = Shape{count, t.dim(1)};
  return part;
}

}  // namespace moesaic::layer
