// Which layouts of hidden states a GPU takes; the same with and without CUDA.
#include <fmt/format.h>

#include "cuda/dense_rows.h"

namespace moesaic::cuda {

Status expect_rows(std::string_view field, const ConstTensorView& x) {
  if (x.is_contiguous()) return {};
  const std::int64_t columns = x.dim(1);
  if ((columns == 1 || x.strides[1] == 1) && (x.dim(0) == 1 || x.strides[0] >= columns)) return {};
  return {StatusCode::kInvalidLayout,
          fmt::format("{}: got strides [{}, {}] of {}, need [{} or more, 1]", field, x.strides[0],
                      x.strides[1], x.shape.to_string(), columns)};
}

ConstTensorView rows_extent(const ConstTensorView& x) {
  const std::int64_t rows = x.dim(0), columns = x.dim(1);
  const std::int64_t length =
      rows == 0 || columns == 0 ? 0 : (rows > 1 ? (rows - 1) * x.strides[0] : 0) + columns;
  return {x.data, x.dtype, {length}, x.device};
}

}  // namespace moesaic::cuda
